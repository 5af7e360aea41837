"""State that running a model changes: taken at one moment and restored later.

`StateSnapshot` is what callers use. Each kind of state has a class of its own here, for
callers that need one kind alone: `Generators`, `Buffers`, `Gradients`, `NotedGradients`
and `WrittenTensors`; `Attributes` is in `recoup.backend.state.attributes`.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from recoup.backend.memory.storages import (
    has_contents,
    has_storage,
    storage_address,
    version_of,
)
from recoup.backend.operators.dispatch import OperatorMode, copy_unseen
from recoup.backend.operators.foreach import choose_all, copy_all
from recoup.backend.operators.kernels import kernel_of
from recoup.backend.state.attributes import Attributes
from recoup.backend.state.rng import (
    RandomStates,
    generator_kinds,
    generator_states,
    random_states,
    restore_generators,
    restore_random_states,
    same_random_states,
)
from recoup.backend.state.trees import tensors
from recoup.backend.state.walk import reach
from recoup.core.restoring import restoring

BufferSlot = tuple[dict[str, Tensor | None], str, Tensor | None]
"""A buffer in its place: the dictionary of a module, the name, and what is there."""


def buffer_slots(modules: Iterable[nn.Module]) -> list[BufferSlot]:
    """Return the buffers that modules themselves have, not their parts, in place.

    Examples:
        >>> norm = nn.BatchNorm1d(3)
        >>> [name for _, name, _ in buffer_slots([norm])]
        ['running_mean', 'running_var', 'num_batches_tracked']
    """
    return [
        (module._buffers, name, buffer)
        for module in modules
        for name, buffer in module._buffers.items()
    ]


def buffers_in(slots: Iterable[BufferSlot]) -> list[Tensor]:
    """Return the buffers that are in their places, each once."""
    return list({id(b): b for _, _, b in slots if b is not None}.values())


def are_in_place(slots: Iterable[BufferSlot]) -> bool:
    """Return whether every buffer is still the tensor that was in its place."""
    return all(buffers.get(name) is buffer for buffers, name, buffer in slots)


def put_in_place(slots: Iterable[BufferSlot]) -> None:
    """Put buffers back that a forward pass replaced, as `self.mean = ...` does.

    Names that were not there before are taken out.

    Examples:
        >>> norm = nn.BatchNorm1d(3)
        >>> slots, mean = buffer_slots([norm]), norm.running_mean
        >>> norm.running_mean = norm.running_mean * 0.9
        >>> put_in_place(slots)
        >>> norm.running_mean is mean
        True
    """
    known: dict[int, tuple[dict[str, Tensor | None], set[str]]] = {}
    for buffers, name, buffer in slots:
        known.setdefault(id(buffers), (buffers, set()))[1].add(name)
        if buffers.get(name) is not buffer:
            buffers[name] = buffer
    for buffers, names in known.values():
        for name in [name for name in buffers if name not in names]:
            del buffers[name]


class StateSnapshot:
    """The state of generators and of modules at one moment.

    Included are the global generators of Python, NumPy, torch and the devices, the
    generators that the given things lead to, and the buffers of the modules that they
    lead to; on request also Python attributes (see `Attributes`). Not included are
    gradients and parameters: see `Gradients` and `WrittenTensors`.

    Costs a copy of the buffers, and a walk through the things.

    Args:
        *things: Modules, functions and other objects; see `reach`.
        devices: The devices whose global generators count, besides the CPU.
        with_numpy: Whether NumPy's global generator counts: reading it takes longer
            than all the others.
        with_attributes: Whether Python attributes count.
        on_cpu: Whether copies of buffers are made on the CPU.

    Attributes:
        modules: The modules that were found.

    Examples:
        >>> norm = nn.BatchNorm1d(2)
        >>> before = StateSnapshot(norm)
        >>> first = norm(torch.randn(8, 2) + 5)
        >>> before.restore()
        >>> norm.running_mean.tolist(), norm.num_batches_tracked.item()
        ([0.0, 0.0], 0)
        >>> torch.equal(norm(torch.randn(8, 2) + 5), first)
        True
    """

    def __init__(
        self,
        *things: object,
        devices: Iterable[torch.device] = (),
        with_numpy: bool = True,
        with_attributes: bool = False,
        on_cpu: bool = False,
    ) -> None:
        found = reach(*things, kind=(nn.Module, *generator_kinds()))
        self.modules = [each for each in found if isinstance(each, nn.Module)]
        own = [each for each in found if not isinstance(each, nn.Module)]
        self.generators = Generators(devices, own, with_numpy=with_numpy)
        self.buffers = Buffers(self.modules, on_cpu=on_cpu)
        self._attributes: Attributes | None = None
        if with_attributes:
            self._attributes = Attributes(*things, *self.modules)

    def take(self) -> None:
        """Take the state as it is now, of the same things as before."""
        self.generators.take()
        self.buffers.take()
        if self._attributes is not None:
            self._attributes.take()

    def can_restore_on(self, device: torch.device) -> bool:
        """Return whether a device could restore everything by itself.

        No generator was drawn from, and no buffer replaced by another tensor: these
        are on the host. Then `buffers.restore_if` restores everything.
        """
        return self.buffers.are_on(device) and self.generators.are_unmoved()

    def restore(self) -> None:
        """Put everything back as it was when it was last taken."""
        if self._attributes is not None:
            self._attributes.restore()
        self.buffers.restore()
        self.generators.restore()


class Generators:
    """Random generators and their states: the global ones, and others.

    Args:
        devices: The devices whose global generators count, besides the CPU.
        own: Generators of torch, Python or NumPy that are not global.
        with_numpy: Whether NumPy's global generator counts, if NumPy is imported.

    Attributes:
        devices: The accelerators whose global generators count.

    Examples:
        >>> own = torch.Generator()
        >>> generators = Generators(own=[own])
        >>> first = torch.rand(1, generator=own)
        >>> generators.restore()
        >>> torch.equal(torch.rand(1, generator=own), first)
        True
    """

    def __init__(
        self,
        devices: Iterable[torch.device] = (),
        own: Iterable[Any] = (),
        *,
        with_numpy: bool = True,
    ) -> None:
        self.devices = [d for d in devices if d.type not in ("cpu", "meta")]
        self._own = list(own)
        self._with_numpy = with_numpy
        self._global: RandomStates
        self._states: list[Any]
        self.take()

    def take(self) -> None:
        """Read the states as they are now."""
        self._global = random_states(*self.devices, with_numpy=self._with_numpy)
        self._states = generator_states(self._own)

    def restore(self) -> None:
        """Put all generators back into the states that were last taken."""
        restore_random_states(self._global, *self.devices)
        restore_generators(self._own, self._states)

    def are_unmoved(self) -> bool:
        """Return whether none was drawn from; NumPy's global one is not asked."""
        now = generator_states(self._own)
        return same_random_states(self._global, *self.devices) and all(
            torch.equal(one, other) if isinstance(one, Tensor) else one == other
            for one, other in zip(now, self._states, strict=True)
        )


class Buffers:
    """The buffers of modules: which tensors they are, and their contents.

    All are copied: kernels such as those of batch normalization write to running
    statistics without a new version.

    Args:
        modules: The modules, without regard to their parts.
        on_cpu: Whether the copies are made on the CPU.
    """

    def __init__(self, modules: Iterable[nn.Module], *, on_cpu: bool = False) -> None:
        self._modules = list(modules)
        self._on_cpu = on_cpu
        self._slots: list[BufferSlot] = []
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []
        self.take()

    def take(self) -> None:
        """Copy the buffers that the modules have now, into the memory of before."""
        slots = buffer_slots(self._modules)
        same = len(slots) == len(self._slots) and are_in_place(self._slots)
        if same:
            for group, copies in self._groups:
                _copy_group(copies, group)
            return
        self._slots = slots
        self._groups = [
            (group, [self._copy(buffer.detach()) for buffer in group])
            for group in _alike(buffers_in(slots))
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """The buffers that were last copied."""
        return [buffer for group, _ in self._groups for buffer in group]

    def restore(self) -> None:
        """Put the tensors back in their places, and their contents in the tensors."""
        put_in_place(self._slots)
        for group, copies in self._groups:
            # Through `.data`: autograd need not notice that it is as before.
            _copy_group([buffer.data for buffer in group], copies)

    def are_on(self, device: torch.device) -> bool:
        """Return whether all are in their places, and on one device."""
        return are_in_place(self._slots) and all(
            group[0].device == device for group, _ in self._groups
        )

    def restore_if(self, flag: Tensor) -> None:
        """Restore contents if the flag is set on their device, without waiting."""
        with torch.no_grad():
            for group, copies in self._groups:
                choose_all(group, copies, flag)

    def _copy(self, buffer: Tensor) -> Tensor:
        if self._on_cpu and type(buffer) is Tensor and not buffer.is_meta:
            return buffer.to("cpu", copy=True)
        return buffer.clone()


@contextmanager
def buffers_restored(*things: object) -> Iterator[None]:
    """Run the block, then restore the buffers of the modules that things lead to.

    Costs a copy of them while the block runs.

    Examples:
        >>> norm = nn.BatchNorm1d(3)
        >>> with buffers_restored(norm):
        ...     _ = norm.num_batches_tracked.add_(1)
        >>> norm.num_batches_tracked.item()
        0
    """
    with restoring(Buffers(reach(*things, kind=nn.Module)).restore):
        yield


class Gradients:
    """The gradients of leaves, to be taken off and restored later.

    On an accelerator they wait on the CPU: a step makes new ones in their place.

    Examples:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> weight.grad = torch.ones(1)
        >>> gradients = Gradients([weight])
        >>> gradients.take_off()
        >>> weight.grad
        >>> gradients.restore()
        >>> weight.grad
        tensor([1.])
    """

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._known = [(leaf, leaf.grad, leaf.requires_grad) for leaf in leaves]
        self._received: set[int] = set()
        self._away: list[tuple[torch.UntypedStorage, Tensor, Tensor]] = []

    def take_off(self) -> None:
        """Take the gradients off, until `restore`."""
        gradients = [grad for _, grad, _ in self._known if grad is not None]
        storages = {
            id(grad.untyped_storage()): (grad, grad.untyped_storage())
            for grad in gradients
            if grad.device.type not in ("cpu", "meta") and has_storage(grad)
        }
        for grad, storage in storages.values():
            if storage.resizable():
                there = _bytes_of(grad.device, storage)
                self._away.append((storage, there, there.cpu()))
                storage.resize_(0)
        self.drop()
        self._received.clear()

    def drop(self) -> None:
        """Drop the gradients that the leaves have now."""
        for leaf, _, _ in self._known:
            if leaf.grad is not None:
                self._received.add(id(leaf))
                leaf.grad = None

    def carry(self) -> None:
        """Give zero gradients to the leaves that have had a gradient since."""
        carry_gradients(
            leaf for leaf, _, _ in self._known if id(leaf) in self._received
        )

    def restore(self) -> None:
        """Put gradients, and which leaves require them, back."""
        self.drop()
        for storage, there, here in self._away:
            storage.resize_(here.nbytes)
            there.copy_(here)
        self._away = []
        for leaf, gradient, required in self._known:
            if leaf.requires_grad is not required and leaf.is_leaf:
                leaf.requires_grad_(required)
            leaf.grad = gradient


def carry_gradients(leaves: Iterable[Tensor]) -> None:
    """Give zero gradients to the leaves that require gradients and have none.

    Examples:
        >>> weight = nn.Parameter(torch.ones(1))
        >>> carry_gradients([weight])
        >>> weight.grad
        tensor([0.])
    """
    for leaf in leaves:
        if leaf.requires_grad and leaf.grad is None:
            leaf.grad = torch.zeros_like(leaf, requires_grad=False)


class NotedGradients:
    """The gradients of leaves, noted without holding them: a step may free them."""

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._noted = [_Noted(leaf) for leaf in leaves]

    def restore(self) -> bool:
        """Put the gradients back if that is possible; return whether it was.

        It is not where gradients that were there before have changed.
        """
        if any(noted.has_changed() for noted in self._noted):
            return False
        for noted in self._noted:
            noted.restore()
        return True


class StepSnapshot:
    """A snapshot of the state before a step, to restore after a failure.

    Included are generators and buffers of everything that the step reaches, and
    gradients, which are noted without being held; not Python attributes. Costs a copy
    of the buffers, and a walk through the variables of the step.

    Examples:
        >>> layer = nn.Linear(1, 1)
        >>> step = lambda: layer(torch.ones(1)).backward()
        >>> before = StepSnapshot(step, layer)
        >>> step()
        >>> before.restore(), layer.weight.grad
        (True, None)
    """

    def __init__(self, *things: object, devices: Iterable[torch.device] = ()) -> None:
        known: list[Tensor] = reach(*things, kind=Tensor)
        self._gradients = NotedGradients(filter(takes_gradient, known))
        self._state = StateSnapshot(*things, devices=devices)

    def restore(self) -> bool:
        """Put everything back if that is possible; return whether it was.

        It is not where gradients that were there before have changed.
        """
        if not self._gradients.restore():
            return False
        self._state.restore()
        return True


def takes_gradient(tensor: Tensor) -> bool:
    """Return whether backward adds to the gradient of a tensor."""
    return tensor.requires_grad and (tensor.is_leaf or tensor.retains_grad)


class _Noted:
    """The gradient of a leaf, known by a weak reference and its version."""

    def __init__(self, leaf: Tensor) -> None:
        gradient = leaf.grad
        self._leaf = leaf
        self._known = None if gradient is None else weakref.ref(gradient)
        self._version = -1 if gradient is None else version_of(gradient)
        self._is_dense = gradient is None or gradient.layout is torch.strided

    def has_changed(self) -> bool:
        """Return whether the gradient of before cannot be had again.

        A gradient that is gone was dropped by the step, which will do so again. But
        backward adds to it in place only if both are dense and no graph is made: else
        it is gone because the sum has taken its place.
        """
        if self._known is None:
            return False
        gradient, now = self._known(), self._leaf.grad
        if gradient is not None:
            return version_of(gradient) != self._version
        return now is not None and (now.requires_grad or not self._is_dense)

    def restore(self) -> None:
        """Put it back, or none if the step had dropped it."""
        self._leaf.grad = None if self._known is None else self._known()


class WrittenTensors:
    """Restores tensors that a step writes to, such as parameters that a hook updates.

    The first run is watched, and a tensor copied to the CPU before an operator writes
    to it: later runs of the same step write to the same ones. Nearly always there is
    none, and nothing is copied. Costs a look at every operator of that run.

    Args:
        known: The tensors; others than plain memory are left out.

    Examples:
        >>> table = nn.Embedding(2, 2, max_norm=1.0)
        >>> _ = nn.init.constant_(table.weight, 3.0)
        >>> written = WrittenTensors(table.parameters())
        >>> with written.watched():
        ...     _ = table(torch.tensor([0]))
        >>> written.restore()
        >>> table.weight.tolist()
        [[3.0, 3.0], [3.0, 3.0]]
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        unique = {id(tensor): tensor for tensor in known}.values()
        self._before = [(t, _detached(t)) for t in unique if _has_memory(t)]
        self.copies: list[tuple[Tensor, Tensor]] = []
        self._has_run = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch what the block writes to, the first time that there is one."""
        if self._has_run:
            yield
            return
        self._has_run = True
        with _Watch(self._before, self.copies):
            yield

    def restore(self) -> None:
        """Give the tensors back the memory they had, and its contents."""
        for tensor, before in self._before:
            if storage_address(tensor) != storage_address(before):
                tensor.data = before
        with torch.no_grad():
            for before, copy in self.copies:
                before.copy_(copy)


class _Watch(OperatorMode):
    """Copies tensors before operators write to their storages."""

    def __init__(
        self,
        known: Iterable[tuple[Tensor, Tensor]],
        copies: list[tuple[Tensor, Tensor]],
    ) -> None:
        super().__init__()
        self._copies = copies
        self._waiting: dict[int, list[Tensor]] = {}
        for _, before in known:
            self._waiting.setdefault(storage_address(before), []).append(before)

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        for place in kernel_of(func).facts.writes:
            # One that is left to its default is not among the arguments.
            by_name = isinstance(place, str)
            given = kwargs.get(place) if by_name else args[place : place + 1]
            for tensor in filter(has_storage, tensors(given)):
                self._copy(storage_address(tensor))
        return func(*args, **kwargs)

    def _copy(self, address: int) -> None:
        for before in self._waiting.pop(address, ()):
            self._copies.append((before, copy_unseen(before)))  # no part of the step


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is memory of this process, with contents."""
    return has_storage(tensor) and has_contents(tensor)


def _detached(tensor: Tensor) -> Tensor:
    if type(tensor) not in (Tensor, nn.Parameter):
        return tensor.detach()
    # A fake tensor mode would return one without memory.
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


def _bytes_of(device: torch.device, storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _alike(buffers: list[Tensor]) -> list[list[Tensor]]:
    """Return the buffers that hold something, in groups of one type and device."""
    groups: dict[Any, list[Tensor]] = {}
    for buffer in buffers:
        if buffer.device.type != "meta":
            groups.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    return list(groups.values())


def _copy_group(targets: list[Tensor], sources: list[Tensor]) -> None:
    with torch.no_grad():
        if targets[0].device == sources[0].device:
            copy_all(targets, sources)
            return
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

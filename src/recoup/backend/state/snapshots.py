"""Snapshots of the state that running a model changes.

Callers use `StateSnapshot`, or one of the classes for a single kind of state:
`Generators`, `Buffers`, `Gradients`, `NotedGradients` and `WrittenTensors`;
`Attributes` is in `recoup.backend.state.attributes`.
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
"""A module's buffer dictionary, a name in it, and the buffer."""


def buffer_slots(modules: Iterable[nn.Module]) -> list[BufferSlot]:
    """Return the slots of the modules' own buffers, without those of submodules.

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
    """Return the buffers of slots, each once."""
    return list({id(b): b for _, _, b in slots if b is not None}.values())


def are_in_place(slots: Iterable[BufferSlot]) -> bool:
    """Return whether every slot still holds the same tensor."""
    return all(buffers.get(name) is buffer for buffers, name, buffer in slots)


def put_in_place(slots: Iterable[BufferSlot]) -> None:
    """Restore buffers that a forward pass replaced, as `self.mean = ...` does.

    Buffers under new names are removed.

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
    """A snapshot of the state of random generators and modules.

    Includes the global generators of Python, NumPy, torch and the devices, generators
    reachable from the given things, and the buffers of reachable modules; on request
    also Python attributes (see `Attributes`). Excludes gradients and parameters: see
    `Gradients` and `WrittenTensors`.

    Costs a copy of the buffers, and a walk through the things.

    Args:
        *things: Modules, functions and other objects; see `reach`.
        devices: Devices whose global generators are included, besides the CPU.
        with_numpy: Whether to include NumPy's global generator, which takes longer to
            read than all the others.
        with_attributes: Whether to include Python attributes.
        on_cpu: Whether copies of buffers are made on the CPU.

    Attributes:
        modules: The reachable modules.

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
        """Save the current state of the same objects."""
        self.generators.take()
        self.buffers.take()
        if self._attributes is not None:
            self._attributes.take()

    def can_restore_on(self, device: torch.device) -> bool:
        """Return whether `buffers.restore_if` would restore everything, on the device.

        That is, no generator was drawn from and no buffer replaced by another tensor:
        only the host can restore these.
        """
        return self.buffers.are_on(device) and self.generators.are_unmoved()

    def restore(self) -> None:
        """Restore the state that was last saved."""
        if self._attributes is not None:
            self._attributes.restore()
        self.buffers.restore()
        self.generators.restore()


class Generators:
    """Random generators and their states: the global ones, and others.

    Args:
        devices: Devices whose global generators are included, besides the CPU.
        own: Generators of torch, Python or NumPy that are not global.
        with_numpy: Whether to include NumPy's global generator, if NumPy is imported.

    Attributes:
        devices: The accelerators whose global generators are included.

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
        """Save the current states."""
        self._global = random_states(*self.devices, with_numpy=self._with_numpy)
        self._states = generator_states(self._own)

    def restore(self) -> None:
        """Restore the states that were last saved."""
        restore_random_states(self._global, *self.devices)
        restore_generators(self._own, self._states)

    def are_unmoved(self) -> bool:
        """Return whether none was drawn from; ignores NumPy's global generator."""
        now = generator_states(self._own)
        return same_random_states(self._global, *self.devices) and all(
            torch.equal(one, other) if isinstance(one, Tensor) else one == other
            for one, other in zip(now, self._states, strict=True)
        )


class Buffers:
    """The buffers of modules: which tensors they are, and their contents.

    All are copied, because kernels such as those of batch normalization bypass the
    version counters of running statistics.

    Args:
        modules: The modules, whose submodules are not included.
        on_cpu: Whether the copies are made on the CPU.
    """

    def __init__(self, modules: Iterable[nn.Module], *, on_cpu: bool = False) -> None:
        self._modules = list(modules)
        self._on_cpu = on_cpu
        self._slots: list[BufferSlot] = []
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []
        self.take()

    def take(self) -> None:
        """Save the current buffers, reusing the memory of earlier copies."""
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
        """Restore which tensors the buffers are, and their contents."""
        put_in_place(self._slots)
        for group, copies in self._groups:
            # Through `.data`, which does not change the version counters.
            _copy_group([buffer.data for buffer in group], copies)

    def are_on(self, device: torch.device) -> bool:
        """Return whether no buffer was replaced, and all are on one device."""
        return are_in_place(self._slots) and all(
            group[0].device == device for group, _ in self._groups
        )

    def restore_if(self, flag: Tensor) -> None:
        """Restore contents if the flag on their device is set; does not synchronise."""
        with torch.no_grad():
            for group, copies in self._groups:
                choose_all(group, copies, flag)

    def _copy(self, buffer: Tensor) -> Tensor:
        if self._on_cpu and type(buffer) is Tensor and not buffer.is_meta:
            return buffer.to("cpu", copy=True)
        return buffer.clone()


@contextmanager
def buffers_restored(*things: object) -> Iterator[None]:
    """Run the block, then restore the buffers of the modules reachable from things.

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
    """The gradients of leaves, which can be removed and restored later.

    Gradients on an accelerator move to the CPU, to make room for a step's new ones.

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
        """Remove the gradients until `restore`."""
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
        """Drop the leaves' current gradients."""
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
        """Restore gradients and `requires_grad`."""
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
    """The gradients of leaves, referenced weakly: a step may free them."""

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._noted = [_Noted(leaf) for leaf in leaves]

    def restore(self) -> bool:
        """Restore the gradients if possible; return whether it was.

        It is impossible if earlier gradients have been changed in place.
        """
        if any(noted.has_changed() for noted in self._noted):
            return False
        for noted in self._noted:
            noted.restore()
        return True


class StepSnapshot:
    """A snapshot of the state before a step, to restore after a failure.

    Includes generators and buffers reachable from the step, and gradients, referenced
    weakly; not Python attributes. Costs a copy of the buffers, and a walk through the
    variables of the step.

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
        """Restore everything if possible; return whether it was.

        It is impossible if earlier gradients have been changed in place.
        """
        if not self._gradients.restore():
            return False
        self._state.restore()
        return True


def takes_gradient(tensor: Tensor) -> bool:
    """Return whether backward accumulates into the tensor's `grad`."""
    return tensor.requires_grad and (tensor.is_leaf or tensor.retains_grad)


class _Noted:
    """The gradient of a leaf: a weak reference and its version."""

    def __init__(self, leaf: Tensor) -> None:
        gradient = leaf.grad
        self._leaf = leaf
        self._known = None if gradient is None else weakref.ref(gradient)
        self._version = -1 if gradient is None else version_of(gradient)
        self._is_dense = gradient is None or gradient.layout is torch.strided

    def has_changed(self) -> bool:
        """Return whether the earlier gradient cannot be restored.

        A dead gradient was usually dropped by the step, which will do so again. But
        unless both gradients are dense and no graph is created, backward replaces it
        by the sum instead of adding in place.
        """
        if self._known is None:
            return False
        gradient, now = self._known(), self._leaf.grad
        if gradient is not None:
            return version_of(gradient) != self._version
        return now is not None and (now.requires_grad or not self._is_dense)

    def restore(self) -> None:
        """Restore the gradient, or set None if the step dropped it."""
        self._leaf.grad = None if self._known is None else self._known()


class WrittenTensors:
    """Restores tensors that a step writes to, such as parameters that a hook updates.

    Observes the first run, and copies a tensor to the CPU before an operator writes to
    it; later runs of the same step write to the same tensors. Usually there is none and
    nothing is copied. Costs a dispatch mode in that run.

    Args:
        known: The tensors; those without a plain storage are ignored.

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
        """Observe the writes of the first such block; later ones run unobserved."""
        if self._has_run:
            yield
            return
        self._has_run = True
        with _Watch(self._before, self.copies):
            yield

    def restore(self) -> None:
        """Restore the tensors' storages and contents."""
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
            # An omitted argument has its default and is absent here.
            by_name = isinstance(place, str)
            given = kwargs.get(place) if by_name else args[place : place + 1]
            for tensor in filter(has_storage, tensors(given)):
                self._copy(storage_address(tensor))
        return func(*args, **kwargs)

    def _copy(self, address: int) -> None:
        for before in self._waiting.pop(address, ()):
            self._copies.append((before, copy_unseen(before)))  # hidden from modes


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has a plain storage with contents."""
    return has_storage(tensor) and has_contents(tensor)


def _detached(tensor: Tensor) -> Tensor:
    if type(tensor) not in (Tensor, nn.Parameter):
        return tensor.detach()
    # A fake tensor mode would return a fake tensor.
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


def _bytes_of(device: torch.device, storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _alike(buffers: list[Tensor]) -> list[list[Tensor]]:
    """Return the buffers with contents, grouped by dtype and device."""
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

"""Rerun: recompute a function by calling it again, where it cannot be recorded."""

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from recoup.backend.autocast import autocast_as, autocast_states
from recoup.backend.buffers import BufferSlot, buffer_slots, buffers_in, put_in_place
from recoup.backend.compiled import original_of
from recoup.backend.defaults import default_dtype, in_default
from recoup.backend.fingerprints import fingerprint
from recoup.backend.graph import (
    at_end_of_backward,
    current_backward,
    pop_hooks,
    push_hooks,
)
from recoup.backend.rng import default_states, random_state
from recoup.backend.storages import alias, has_storage
from recoup.backend.transforms import outside_transforms
from recoup.backend.trees import leaves, map_leaves, tensors
from recoup.core.errors import ClearedError, MismatchError
from recoup.engine.active import is_recordable, refuse_transform
from recoup.engine.captures import Captures
from recoup.engine.holding import hand_over, is_handing_over
from recoup.engine.observers import Listener, observers
from recoup.engine.recomputing import recomputing
from recoup.engine.region import STATE_BYTES
from recoup.engine.values import Hold
from recoup.engine.verification import LEDGER, RECOMPUTED, Verdict


def rerun(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function; recompute what it saves by calling it again in backward.

    This is function-level recomputation as in torch.utils.checkpoint. recoup uses it
    for compiled functions, which cannot be recorded. Prefer `checkpoint`, which
    records: there, no user code runs twice.

    The second call sees the random state, the autocast state, the default dtype, the
    arguments and the module buffers of the first; buffers are put back afterwards. It
    is stopped once it has saved what backward needs. Each saved tensor must have the
    shape and type of the first call's, and, the first time a function is used, the
    same bits.

    Costs: the function once more per backward; copies of its modules' small buffers.

    Args:
        function: What to call. It must do the same when called again.
        *args: Its positional arguments, any nested structure of tensors.
        **kwargs: Its keyword arguments.

    Returns:
        What the function returns.

    Raises:
        UnsupportedError: It is called under a torch.func transform that refuses hooks.

    Examples:
        >>> x = torch.ones(3, requires_grad=True)
        >>> rerun(lambda t: t.sin().exp(), x).sum().backward()
        >>> torch.equal(x.grad, x.sin().exp().detach() * x.cos().detach())
        True
    """
    if not is_recordable(_name_of(function)):
        return function(*args, **kwargs)
    call = Rerun(function, args, kwargs)
    for observer in observers():
        observer.began(call)
    push_hooks(call.pack, call.unpack)
    try:
        result = function(*args, **kwargs)
    except RuntimeError as error:
        refuse_transform(call.name, error)
        raise
    finally:
        pop_hooks()
    hand_over(call.holds())
    for observer in observers():
        observer.ended(call)
    return result


class Slot:
    """Stands for one tensor that the function saved in its first call."""

    __slots__ = ("device", "dtype", "place", "print", "shape")

    def __init__(self, place: int, tensor: Tensor, seen: Tensor | None) -> None:
        self.place = place
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.print = seen


class Rerun:
    """One call of a function that will be called again in backward."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        given = tensors((args, kwargs))
        devices = [t.device for t in given if t.device.type != "cpu"]
        original = original_of(function)
        self.name = _name_of(function)
        self.replays = 0
        self.listeners: tuple[Listener, ...] = ()
        self._function: Callable[..., Any] | None = function
        self._captures = Captures(original)
        self._buffers = _Buffers(self._captures.modules())
        self._random = default_states(devices)
        self._default_dtype = default_dtype()
        self._autocast = autocast_states({device.type for device in devices})
        self._arguments = map_leaves(_held, (args, kwargs))
        self._key: Hashable = ("rerun", getattr(original, "__code__", type(original)))
        self._verifies = LEDGER.needs(self._key)
        self._count = 0
        self._task = -1
        self._found: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._lock = threading.RLock()

    def pack(self, tensor: Tensor) -> Slot:
        """Forget a tensor that the first call saves."""
        if not is_handing_over():
            for listener in self.listeners:
                listener(tensor)
        place = self._count
        self._count += 1
        return Slot(place, tensor, self._fingerprint(tensor))

    def unpack(self, slot: Slot) -> Tensor:
        """Return the tensor, calling the function again if this backward has not."""
        with self._lock:
            task = current_backward()
            if task == -1 or task != self._task or slot.place not in self._found:
                self._found = self._call_again()
                self._task = task
                if task != -1:
                    at_end_of_backward(_Forgetting(self))
            tensor, seen = self._found.pop(slot.place)
            self._compare(slot, tensor, seen)
            return tensor

    def holds(self) -> list[Hold]:
        """Return the arguments that are held for the second call."""
        arguments = leaves(self._arguments)
        return [leaf.hold for leaf in arguments if isinstance(leaf, _Argument)]

    def random_bytes(self) -> int:
        """Return the bytes of the generator states kept."""
        return sum(state.nbytes for _, state in self._random)

    def recompute(self) -> tuple[Tensor, ...]:
        """Call the function again now and return what it saves."""
        return tuple(tensor for tensor, _ in self._call_again().values())

    def clear(self) -> None:
        """Drop the arguments; a later backward through the call is an error."""
        self._function = None
        self._arguments = ()
        self._found = {}

    def forget(self) -> None:
        """Drop recomputed tensors that backward did not ask for."""
        with self._lock:
            self._found = {}
            self._task = -1

    def _call_again(self) -> dict[int, tuple[Tensor, Tensor | None]]:
        if self._function is None:
            raise ClearedError(
                f"backward needs a tensor saved in {self.name!r}, but its checkpoints "
                "were cleared. Run backward before clearing them."
            )
        self._captures.check(self.name)
        collected = _Collector(self._count, self._fingerprint)
        # Not as a part of a batch of gradients, which random operators refuse.
        with outside_transforms():
            args, kwargs = map_leaves(_fetched, self._arguments)
        with outside_transforms(), self._as_before():
            push_hooks(collected.pack, collected.unpack)
            try:
                self._function(*args, **kwargs)
            except _Complete:
                pass
            finally:
                pop_hooks()
        self.replays += 1
        if len(collected.found) < self._count:
            raise MismatchError(
                f"{self.name!r} saved {self._count} tensors in forward, but only "
                f"{len(collected.found)} when it was called again in backward. A "
                "function that is run again must do the same both times."
            )
        return collected.found

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(recomputing())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(autocast_as(self._autocast))
            if self._default_dtype is not default_dtype():
                stack.enter_context(in_default(self._default_dtype))
            for generator, state in self._random:
                stack.enter_context(random_state(generator, state))
            stack.enter_context(self._buffers.as_before())
            yield

    def _fingerprint(self, tensor: Tensor) -> Tensor | None:
        # Taken while the call runs, both times: a buffer may move on after that.
        # Bytes are workspaces with padding (oneDNN's), never activations.
        if self._verifies and has_storage(tensor) and tensor.dtype != torch.uint8:
            return fingerprint(tensor)
        return None

    def _compare(self, slot: Slot, tensor: Tensor, seen: Tensor | None) -> None:
        before = (slot.shape, slot.dtype, slot.device)
        if before != (tensor.shape, tensor.dtype, tensor.device):
            raise MismatchError(
                f"{self.name!r} saved a tensor of shape {tuple(slot.shape)} and type "
                f"{slot.dtype} in forward, but {tuple(tensor.shape)} and "
                f"{tensor.dtype} when it was called again in backward. It must do the "
                "same both times."
            )
        if slot.print is None or seen is None:
            return
        verdict = Verdict(self.name, self._key, 0)
        complaint = RECOMPUTED.format("the function")
        verdict.add(slot.place, complaint, (seen != slot.print).any())
        if current_backward() == -1:
            verdict()
        else:
            at_end_of_backward(verdict)


class _Forgetting:
    """Drops what a backward left unused, without keeping the call alive till then."""

    def __init__(self, call: Rerun) -> None:
        self._call = weakref.ref(call)

    def __call__(self) -> None:
        call = self._call()
        if call is not None:
            call.forget()


class _Complete(Exception):  # noqa: N818 (a signal, not an error)
    """Stops the second call once it has saved everything."""


class _Collector:
    """Collects what the second call saves."""

    def __init__(self, count: int, look: Callable[[Tensor], Tensor | None]) -> None:
        self._count = count
        self._look = look
        self.found: dict[int, tuple[Tensor, Tensor | None]] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        # Detached: an operator's own output would hold itself through its graph.
        kept = tensor.detach()
        self.found[len(self.found)] = (kept, self._look(kept))
        if len(self.found) == self._count:
            raise _Complete
        return kept

    def unpack(self, tensor: Tensor) -> Tensor:
        return tensor


def _held(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return _Argument(Hold(alias(leaf)), leaf.requires_grad)


class _Argument:
    """A tensor argument of the first call, held for the second."""

    def __init__(self, hold: Hold, requires_grad: bool) -> None:  # noqa: FBT001
        self.hold = hold
        self.requires_grad = requires_grad


def _fetched(leaf: Any) -> Any:
    if not isinstance(leaf, _Argument):
        return leaf
    tensor = leaf.hold.fetch("a function that is run again").detach()
    return tensor.requires_grad_(leaf.requires_grad)


class _Buffers:
    """The buffers of modules as they were: which tensors, and copies of small ones."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._slots = _slots_of(modules)
        self._copies = [
            (buffer, buffer.detach().clone())
            for buffer in buffers_in(self._slots)
            if buffer.nbytes <= STATE_BYTES
        ]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Run the block with buffers as they were, then put them back as they are."""
        slots = _slots_of(self._modules)
        contents = [buffer.detach().clone() for buffer, _ in self._copies]
        put_in_place(self._slots)
        with torch.no_grad():
            for buffer, before in self._copies:
                _set(buffer, before)
        try:
            yield
        finally:
            put_in_place(slots)
            with torch.no_grad():
                for (buffer, _), content in zip(self._copies, contents, strict=True):
                    _set(buffer, content)


def _slots_of(modules: list[nn.Module]) -> list[BufferSlot]:
    return [slot for module in modules for slot in buffer_slots(module)]


def _set(buffer: Tensor, content: Tensor) -> None:
    # Through `.data`: putting a buffer back is no change that autograd must notice.
    buffer.data.copy_(content)


def _name_of(function: Callable[..., Any]) -> str:
    original = original_of(function)
    return getattr(original, "__qualname__", type(original).__name__)

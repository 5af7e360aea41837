"""Rerun: recompute a function that cannot be recorded by calling it again."""

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from recoup.backend.autograd.autocast import (
    autocast_as,
    autocast_states,
    default_dtype,
    in_default,
)
from recoup.backend.autograd.hook_stacks import Footing
from recoup.backend.autograd.saved_tensors import (
    Pack,
    Unpack,
    current_backward,
    follow_backward,
    is_parameter,
    push_hooks,
    recording,
)
from recoup.backend.autograd.transforms import outside_transforms
from recoup.backend.autograd.wrappers import inner_tensors
from recoup.backend.compiler.recognition import leave_uncompiled, original_of
from recoup.backend.memory.storages import (
    NO_VERSION,
    alias,
    has_storage,
    version_counter,
)
from recoup.backend.operators.fingerprints import fingerprint, is_written
from recoup.backend.state.rng import default_states, random_state
from recoup.backend.state.trees import map_leaves
from recoup.backend.training.optimizer_steps import STEPS
from recoup.core.restoring import restoring
from recoup.engine.lifetime.handover import (
    Collector,
    hand_over,
    is_handing_over,
    role_around,
)
from recoup.engine.lifetime.values import (
    Hold,
    activation_bytes,
    written_in_backward,
)
from recoup.engine.recording.active import (
    depth,
    end_above,
    end_left,
    is_recordable,
    refuse_transform,
)
from recoup.engine.recording.observers import Listener, observers, tell
from recoup.engine.replay.call_state import CallState, FunctionState
from recoup.engine.replay.recomputing import count_replay_seconds, recomputing
from recoup.engine.scopes.statistics import Account
from recoup.engine.verification.replay_check import RECOMPUTED, Verdict, hand_in
from recoup.engine.verification.verification_log import LEDGER
from recoup.errors import ClearedError, MismatchError

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""A factor that makes a wrapper's fingerprint depend on the order of its tensors."""


def rerun(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function; recompute what it saves by calling it again in backward.

    This is function-level recomputation as in torch.utils.checkpoint. recoup uses it
    for compiled functions, which cannot be recorded. Prefer `checkpoint`, which records
    operators, so that no user code runs twice.

    The second call sees the random state, the autocast state, the default dtype, the
    arguments and the module buffers of the first; buffers are restored afterwards. It
    is stopped once it has saved what backward needs. Each saved tensor must have the
    shape and dtype of the first call's, and, the first time a function is used, the
    same bits. Regions inside the function bound the memory of the second call; the
    first call keeps only the arguments.

    Costs: the function once more per backward; copies of its modules' small buffers,
    and of large ones that are written to or are new. Finding the modules takes about a
    millisecond if there are hundreds.

    Args:
        function: The function, which must do the same when called again.
        *args: Its positional arguments, any pytree of tensors.
        **kwargs: Its keyword arguments.

    Returns:
        The function's result.

    Raises:
        UnsupportedError: It is called under a torch.func transform that refuses hooks.
            For errors in backward, see the guide.

    Examples:
        >>> x = torch.ones(3, requires_grad=True)
        >>> rerun(lambda t: t.sin().exp(), x).sum().backward()
        >>> torch.equal(x.grad, x.sin().exp().detach() * x.cos().detach())
        True
    """
    if not is_recordable(_name_of(function)):
        return function(*args, **kwargs)
    is_forgotten, collector = role_around()
    if is_forgotten:
        return function(*args, **kwargs)
    original = original_of(function)
    key = _key_of(original)
    state = FunctionState(original, (function, args, kwargs), key)
    identity = CallIdentity(_name_of(function), key, LEDGER.needs(key))
    call = Rerun(function, args, kwargs, identity, state)
    return run_first(call, collector)


def run_first(call: "Rerun", collector: Collector | None = None) -> Any:
    """Make the first call of a function; drop the tensors that autograd saves in it.

    Args:
        call: The call.
        collector: The collector of saved tensors, if this call runs in the second call
            of another function.
    """
    call.collector = collector
    function, args, kwargs = call.begin()
    for observer in observers():
        observer.began(call)
    for account in call.accounts:
        account.calls += 1
    with _Hooks(call.pack if collector is None else call.collect, call.unpack):
        try:
            result = function(*args, **kwargs)
        except RuntimeError as error:
            refuse_transform(call.name, error)
            raise
    call.settle()
    hand_over(call.holds())
    for observer in observers():
        observer.ended(call)
    return result


class CallIdentity(NamedTuple):
    """The identity of a rerun function.

    Attributes:
        name: Its name in messages and statistics.
        key: Its identity for verification.
        verifies: Whether the bits of both calls are compared.
    """

    name: str
    key: Hashable
    verifies: bool


Slot = tuple[int, torch.Size, torch.dtype]
"""The packed form of a tensor saved in the first call: its position, shape and dtype. A
plain tuple, because each call has dozens."""


class Rerun:
    """One call of a function that will be called again in backward.

    Attributes:
        forgets: Whether tensors saved in the call are dropped: see `role_around`.
        collector: See `run_first`.
    """

    forgets = True
    collector: Collector | None = None

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        identity: CallIdentity,
        state: CallState,
    ) -> None:
        self.name, self._key, self._verifies = identity
        self.replays = 0
        self.listeners: tuple[Listener, ...] = ()
        self.accounts: tuple[Account, ...] = ()
        self._is_counted = False
        self._saved_bytes = 0
        self._function: Callable[..., Any] | None = function
        self._state = state
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = args, kwargs
        self._held: list[_Argument] = []
        self._arguments: Any = _hold_all((args, kwargs), self._held)
        devices = {each.device for each in self._held if each.device.type != "cpu"}
        self._random = default_states(list(devices))
        self._default_dtype = default_dtype()
        self._device_types = {device.type for device in devices}
        self._autocast = autocast_states(self._device_types)
        self._since = LEDGER.moment
        self._prints: list[Tensor | None] = []
        self._count = 0
        self._task = -1
        self._found: dict[int, _Found] = {}
        self._lock = threading.RLock()
        STEPS.begin(self)

    def __del__(self) -> None:
        STEPS.end(self)

    def begin(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return the function and its arguments, for the first call."""
        assert self._function is not None, "it has not been cleared"
        assert self._given is not None, "there is one first call"
        (args, kwargs), self._given = self._given, None
        return self._function, args, kwargs

    def settle(self) -> None:
        """Record the state that the first call has read, at its end."""
        self._state.settle()

    @leave_uncompiled
    def pack(self, tensor: Tensor) -> Slot:
        """Drop a tensor that the first call saves."""
        if self._verifies or self.accounts or self.listeners:
            tell(self.listeners, tensor)
            if self.accounts and not is_parameter(tensor):
                self._saved_bytes += tensor.nbytes if has_storage(tensor) else 0
            self._prints.append(self._fingerprint(tensor))
        place = self._count
        self._count = place + 1
        return place, tensor.shape, tensor.dtype

    @leave_uncompiled
    def collect(self, tensor: Tensor) -> Slot:
        """Drop a tensor, and pass it to the collector of the enclosing call."""
        slot = self.pack(tensor)
        assert self.collector is not None, "these hooks are used with one only"
        self.collector.take(tensor, slot, self.unpack)
        return slot

    @leave_uncompiled
    def unpack(self, slot: Slot) -> Tensor:
        """Return the tensor, after calling the function again once per backward."""
        with self._lock:
            task = current_backward()
            found = self._found
            place, shape, dtype = slot
            if task == -1 or task != self._task or place not in found:
                found, prints = self._call_again()
                if self._verifies:
                    self._compare(prints)
                # Outside of backward nothing would drop the rest.
                if task != -1:
                    self._found = found
                    self._task = task
                    follow_backward(self)
            packed, version, unpack = found.pop(place)
        if unpack is not None:
            tensor = unpack(packed)
        else:
            tensor = packed
            if version_counter(tensor) != version:
                raise written_in_backward(tensor)
        if tensor.shape != shape or tensor.dtype != dtype:
            self._refuse(slot, tensor)
        return tensor

    def holds(self) -> list[Hold]:
        """Return the arguments that are held for the second call."""
        return [argument.hold for argument in self._held]

    def random_bytes(self) -> int:
        """Return the bytes of the saved generator states."""
        return sum(state.nbytes for _, state in self._random)

    def count_bytes(self) -> None:
        """Add the kept and freed bytes to the accounts, once."""
        if not self._is_counted:
            self._is_counted = True
            kept = activation_bytes(self.holds()) + self.random_bytes()
            for account in self.accounts:
                account.kept_bytes += kept
                account.freed_bytes += self._saved_bytes

    def recompute(self) -> tuple[Tensor, ...]:
        """Call the function again now and return the tensors it saves."""
        found, _ = self._call_again()
        return tuple(
            packed if unpack is None else unpack(packed)
            for packed, _, unpack in found.values()
        )

    def clear(self) -> None:
        """Drop the arguments; a later backward through the call is an error."""
        self._function = None
        self._arguments = ()
        self._held = []
        self._found = {}

    def end(self, task: int) -> None:
        """Drop recomputed tensors that a backward did not use."""
        with self._lock:
            if task == self._task:
                self._found = {}
                self._task = -1

    def _call_again(self) -> "tuple[dict[int, _Found], list[Tensor | None]]":
        """Call the function; return saved tensors by position, and fingerprints."""
        if self._function is None:
            raise ClearedError(
                f"backward needs a tensor saved in {self.name!r}, but its checkpoints "
                "were cleared. Run backward before clearing them."
            )
        self._state.check(self.name)
        self.count_bytes()
        start = perf_counter()
        collected = _Collector(
            self._count,
            self._fingerprint if self._verifies else None,
            self._state,
            counts=bool(self.accounts),
        )
        # Outside of batched gradients, where random operators are forbidden.
        with outside_transforms():
            args, kwargs = _fetch_all(self._arguments)
        hooks = _Hooks(collected.pack, collected.unpack)
        try:
            with outside_transforms(), self._as_before(), hooks, suppress(_Complete):
                self._function(*args, **kwargs)
        finally:
            found, prints = collected.finish()
        seconds = count_replay_seconds(start)
        self.replays += 1
        for account in self.accounts:
            account.replays += 1
            account.replay_seconds += seconds
            account.recomputed_bytes += collected.nbytes
        if len(found) < self._count:
            raise MismatchError(
                f"{self.name!r} saved {self._count} tensors in forward, but only "
                f"{len(found)} when it was called again in backward. A "
                "recomputed function must do the same both times."
            )
        return found, prints

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        with recomputing(), ExitStack() as stack:
            stack.enter_context(recording())
            if autocast_states(self._device_types) != self._autocast:
                stack.enter_context(autocast_as(self._autocast))
            if self._default_dtype is not default_dtype():
                stack.enter_context(in_default(self._default_dtype))
            for generator, state in self._random:
                stack.enter_context(random_state(generator, state))
            stack.enter_context(self._state.as_before(self.name))
            yield

    def _fingerprint(self, tensor: Tensor) -> Tensor | None:
        # Taken during both calls, because a buffer may change afterwards.
        if not self._verifies:
            return None
        found: Tensor | None = None
        for part in inner_tensors(tensor):
            if is_written(part):
                one = fingerprint(part)
                found = one if found is None else found * _ODD + one
        return found

    def _refuse(self, slot: Slot, tensor: Tensor) -> NoReturn:
        raise MismatchError(
            f"{self.name!r} saved a tensor of shape {tuple(slot[1])} and type "
            f"{slot[2]} in forward, but {tuple(tensor.shape)} and {tensor.dtype} "
            "when it was called again in backward. It must do the same both times."
        )

    def _compare(self, again: list[Tensor | None]) -> None:
        """Compare all saved tensors, even those that this backward does not need."""
        pairs = zip(self._prints, again, strict=True)
        verdict = Verdict(self.name, self._key, operators=0, since=self._since)
        complaint = RECOMPUTED.format("the function")
        compared = False
        for place, (before, now) in enumerate(pairs):
            if before is not None and now is not None:
                verdict.add(place, complaint, before != now)
                compared = True
        if compared:
            hand_in(verdict)


class _Hooks(restoring):
    """Use these saved-tensor hooks in the block."""

    __slots__ = ("_opened", "_pack", "_unpack")

    def __init__(self, pack: Pack, unpack: Unpack) -> None:
        super().__init__(partial(Footing.drop, pack, None))
        self._pack = pack
        self._unpack = unpack

    def __enter__(self) -> None:
        self._opened = depth()
        super().__enter__()
        push_hooks(self._pack, self._unpack)

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> None:
        # If the function caught an interrupt, a module's region may still be open, with
        # its hooks above these.
        try:
            if kind is None or issubclass(kind, Exception):
                end_left(self._opened)
            else:
                end_above(self._opened)
        finally:
            super().__exit__(kind, *error)


class _Complete(Exception):  # noqa: N818 (a signal, not an error)
    """Stops the second call once it has saved everything."""


_Found = tuple[Any, int, Unpack | None]
"""A tensor saved by the second call, with its version; or a region's packed form of it,
with the unpack function."""


class _Collector:
    """Collects the tensors that the second call saves.

    Attributes:
        nbytes: The bytes of all saved tensors.
        collector: Itself, for regions inside the call; see `role_around`.
    """

    def __init__(
        self,
        count: int,
        look: Callable[[Tensor], Tensor | None] | None,
        state: CallState,
        *,
        counts: bool,
    ) -> None:
        self._count = count
        self._look = look
        self._are_behind = state.are_behind if state.has_buffers else None
        self._counts = counts
        self._found: dict[int, _Found] = {}
        self._prints: list[Tensor | None] = []
        self.nbytes = 0

    @property
    def collector(self) -> Collector:
        return self

    @leave_uncompiled
    def pack(self, tensor: Tensor) -> Tensor:
        # Detached: an operator's output would keep itself alive through its graph.
        kept = tensor.detach()
        if self._are_behind is not None and self._are_behind(kept):
            kept = kept.clone()  # the buffer is restored before backward uses this
        if is_handing_over():
            return kept
        if self._look is not None or self._counts:
            self._note(kept)
        found = self._found
        place = len(found)
        if place < self._count:  # else the function has caught `_Complete`
            found[place] = kept, version_counter(kept), None
            if place + 1 == self._count:
                raise _Complete
        return kept

    def take(self, tensor: Tensor, packed: Any, unpack: Unpack) -> None:
        """Add a tensor that a region in the call has packed."""
        if self._look is not None or self._counts:
            self._note(tensor)
        place = len(self._found)
        if place < self._count:
            self._found[place] = packed, NO_VERSION, unpack
            if place + 1 == self._count:
                raise _Complete

    def finish(self) -> tuple[dict[int, _Found], list[Tensor | None]]:
        """Return saved tensors by position, and fingerprints; stop collecting.

        Drops its own references: regions in the call refer to the collector, and their
        packed tensors to them, so only garbage collection would free the cycle.
        """
        collected = self._found, self._prints
        self._found, self._prints, self._count = {}, [], 0
        return collected

    def _note(self, tensor: Tensor) -> None:
        if len(self._found) >= self._count:
            return
        if self._look is not None:
            self._prints.append(self._look(tensor))
        if self._counts:
            self.nbytes += tensor.nbytes if has_storage(tensor) else 0

    @leave_uncompiled
    def unpack(self, tensor: Tensor) -> Tensor:
        return tensor


class _Argument:
    """A tensor argument of the first call, held for the second."""

    __slots__ = ("device", "hold", "requires_grad")

    def __init__(self, tensor: Tensor) -> None:
        self.hold = Hold(alias(tensor))
        self.requires_grad = tensor.requires_grad
        self.device = tensor.device

    def fetch(self) -> Tensor:
        """Return the tensor as an argument of the second call."""
        # A new tensor each time: if the function writes to it, it may get a graph.
        tensor = self.hold.fetch("a recomputed function").detach()
        return tensor.requires_grad_() if self.requires_grad else tensor


_PLAIN = frozenset({int, float, complex, str, bool, type(None), torch.dtype})


def _hold_all(tree: Any, held: list[_Argument]) -> Any:
    """Return arguments with every tensor replaced by an `_Argument`.

    Inlined for common types: torch's pytrees take longer than a layer.
    """
    kind = type(tree)
    if kind in _PLAIN:
        return tree
    if kind is tuple or kind is list:
        return kind([_hold_all(part, held) for part in tree])
    if kind is dict:
        return {name: _hold_all(part, held) for name, part in tree.items()}
    if isinstance(tree, Tensor):
        held.append(_Argument(tree))
        return held[-1]
    return map_leaves(partial(_hold_leaf, held), tree)


def _hold_leaf(held: list[_Argument], leaf: Any) -> Any:
    return _hold_all(leaf, held) if isinstance(leaf, Tensor) else leaf


def _fetch_all(tree: Any) -> Any:
    """Return the arguments of the second call."""
    kind = type(tree)
    if kind in _PLAIN:
        return tree
    if kind is _Argument:
        return tree.fetch()
    if kind is tuple or kind is list:
        return kind([_fetch_all(part) for part in tree])
    if kind is dict:
        return {name: _fetch_all(part) for name, part in tree.items()}
    return map_leaves(_fetch_leaf, tree)


def _fetch_leaf(leaf: Any) -> Any:
    return leaf.fetch() if type(leaf) is _Argument else leaf


def _key_of(original: Any) -> Hashable:
    """Return a function's identity for verification: its code and module."""
    code = getattr(original, "__code__", type(original))
    own = getattr(original, "__self__", None)
    module = original if isinstance(original, nn.Module) else own
    if not isinstance(module, nn.Module):
        return "rerun", code
    key = "rerun", code, weakref.ref(module)
    hash(key)  # caches the hash, which a dead weak reference could not compute
    LEDGER.forget_with(module, key)
    return key


def _name_of(function: Callable[..., Any]) -> str:
    original = original_of(function)
    return getattr(original, "__qualname__", type(original).__name__)

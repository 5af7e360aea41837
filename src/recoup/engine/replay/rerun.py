"""Rerun: recompute a function by calling it again, where it cannot be recorded."""

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
"""Tells the tensors that a wrapper is made of by their order."""


def rerun(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function; recompute what it saves by calling it again in backward.

    This is function-level recomputation as in torch.utils.checkpoint. recoup uses it
    for compiled functions, which cannot be recorded. Prefer `checkpoint`, which
    records: there, no user code runs twice.

    The second call sees the random state, the autocast state, the default dtype, the
    arguments and the module buffers of the first; buffers are put back afterwards. It
    is stopped once it has saved what backward needs. Each saved tensor must have the
    shape and type of the first call's, and, the first time a function is used, the
    same bits. Regions inside the function take effect in the second call, whose memory
    they bound; the first keeps nothing but the arguments.

    Costs: the function once more per backward; copies of its modules' small buffers,
    and of large ones that are written to or are new. Looking for the modules takes
    about a millisecond where there are hundreds.

    Args:
        function: What to call. It must do the same when called again.
        *args: Its positional arguments, any nested structure of tensors.
        **kwargs: Its keyword arguments.

    Returns:
        What the function returns.

    Raises:
        UnsupportedError: It is called under a torch.func transform that refuses hooks.
            What backward raises is in the guide.

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
    """Make the first call of a function; forget what autograd saves in it.

    Args:
        call: The call.
        collector: Collects what autograd saves in the call, if it is itself made in
            the second call of another function.
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
    """What a function that is called again is known by.

    Attributes:
        name: Its name in messages and statistics.
        key: Identifies it for verification.
        verifies: Whether the bits of both calls are compared.
    """

    name: str
    key: Hashable
    verifies: bool


Slot = tuple[int, torch.Size, torch.dtype]
"""Stands for one tensor that the function saved in its first call: its place among
these, its shape and its type. A plain tuple: there are dozens in each call."""


class Rerun:
    """One call of a function that will be called again in backward.

    Attributes:
        forgets: What autograd saves in the call is forgotten: see `role_around`.
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
        """Note what the first call has read: it has ended."""
        self._state.settle()

    @leave_uncompiled
    def pack(self, tensor: Tensor) -> Slot:
        """Forget a tensor that the first call saves."""
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
        """Forget a tensor, and pass it to the collector of the call around this one."""
        slot = self.pack(tensor)
        assert self.collector is not None, "these hooks are used with one only"
        self.collector.take(tensor, slot, self.unpack)
        return slot

    @leave_uncompiled
    def unpack(self, slot: Slot) -> Tensor:
        """Return the tensor, calling the function again if this backward has not."""
        with self._lock:
            task = current_backward()
            found = self._found
            place, shape, dtype = slot
            if task == -1 or task != self._task or place not in found:
                found, prints = self._call_again()
                if self._verifies:
                    self._compare(prints)
                # Outside a backward nothing would drop the rest.
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
        """Return the bytes of the generator states kept."""
        return sum(state.nbytes for _, state in self._random)

    def count_bytes(self) -> None:
        """Add to the accounts what it keeps and frees, once."""
        if not self._is_counted:
            self._is_counted = True
            kept = activation_bytes(self.holds()) + self.random_bytes()
            for account in self.accounts:
                account.kept_bytes += kept
                account.freed_bytes += self._saved_bytes

    def recompute(self) -> tuple[Tensor, ...]:
        """Call the function again now and return what it saves."""
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
        """Drop recomputed tensors that a backward did not ask for."""
        with self._lock:
            if task == self._task:
                self._found = {}
                self._task = -1

    def _call_again(self) -> "tuple[dict[int, _Found], list[Tensor | None]]":
        """Call the function; return what it saves by place, and the fingerprints."""
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
        # Not as a part of a batch of gradients, which random operators refuse.
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
        # Taken while the call runs, both times: a buffer may move on after that.
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
        """Compare all that was saved, whether this backward asks for it or not."""
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
        # A module's region that an interrupt has left open, if the function has caught
        # it: its hooks lie above these.
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
"""A tensor that the second call has saved, and its version; or what a region made of
it, and the function that returns the tensor, given that."""


class _Collector:
    """Collects what the second call saves.

    Attributes:
        nbytes: The bytes of all that autograd has saved.
        collector: Itself: the regions in the call find it here.
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
        # Detached: an operator's own output would hold itself through its graph.
        kept = tensor.detach()
        if self._are_behind is not None and self._are_behind(kept):
            kept = kept.clone()  # it is put back before backward uses this
        if is_handing_over():
            return kept
        if self._look is not None or self._counts:
            self._note(kept)
        found = self._found
        place = len(found)
        if place < self._count:  # else the function has caught what was to stop it
            found[place] = kept, version_counter(kept), None
            if place + 1 == self._count:
                raise _Complete
        return kept

    def take(self, tensor: Tensor, packed: Any, unpack: Unpack) -> None:
        """Take a tensor that a region in the call has packed."""
        if self._look is not None or self._counts:
            self._note(tensor)
        place = len(self._found)
        if place < self._count:
            self._found[place] = packed, NO_VERSION, unpack
            if place + 1 == self._count:
                raise _Complete

    def finish(self) -> tuple[dict[int, _Found], list[Tensor | None]]:
        """Return what was saved by place, and the fingerprints; take no more.

        It keeps none of that. The regions in the call refer to the collector, and what
        they packed refers to them: only a collection of garbage would free the cycle.
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
        # A new tensor each time: one that the function writes to may get a graph.
        tensor = self.hold.fetch("a recomputed function").detach()
        return tensor.requires_grad_() if self.requires_grad else tensor


_PLAIN = frozenset({int, float, complex, str, bool, type(None), torch.dtype})


def _hold_all(tree: Any, held: list[_Argument]) -> Any:
    """Return arguments with every tensor replaced by one that is held.

    Written out for what most arguments are: torch's trees take longer than a layer.
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
    """Return what verification knows a function by: its code, and its module."""
    code = getattr(original, "__code__", type(original))
    own = getattr(original, "__self__", None)
    module = original if isinstance(original, nn.Module) else own
    if not isinstance(module, nn.Module):
        return "rerun", code
    key = "rerun", code, weakref.ref(module)
    hash(key)  # a weak reference has one after the end only if it had one before
    LEDGER.forget_with(module, key)
    return key


def _name_of(function: Callable[..., Any]) -> str:
    original = original_of(function)
    return getattr(original, "__qualname__", type(original).__name__)

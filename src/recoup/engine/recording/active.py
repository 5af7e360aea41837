"""The regions that are open on this thread, and how one is begun and ended."""

import threading
from collections.abc import Callable, Hashable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from recoup.backend.autograd.module_hooks import is_running
from recoup.backend.autograd.saved_tensors import hooks_refused, records_gradients
from recoup.backend.autograd.transforms import outside_transforms
from recoup.backend.compiler.recognition import leave_uncompiled
from recoup.engine.recording.observers import observers
from recoup.engine.recording.region import Region
from recoup.engine.recording.region_options import Options
from recoup.engine.scopes.statistics import Account
from recoup.errors import UnsupportedError, UsageError

_TRANSFORM = "don't yet support saved tensor hooks"


Entry = tuple[object, Region | None]
"""An owner, and its region if there is one."""


class _Open(threading.local):
    """The open regions and owners of this thread."""

    def __init__(self) -> None:
        self.stack: list[Entry] = []


class Call:
    """An owner of what is begun and ended by hooks of a module's call.

    Args:
        frame: The frame in which torch runs the hooks and forward, if that is known. It
            is kept itself: its identity is soon another one's.
    """

    def __init__(self, frame: FrameType | None = None) -> None:
        self._frame = frame
        self._thread = threading.get_ident()
        self._was_left = False

    def is_under_way(self) -> bool:
        """Return whether the call runs, as far as can be known on this thread."""
        if self._was_left:
            return False
        if self._frame is None or self._thread != threading.get_ident():
            return True
        return is_running(self._frame)

    def leave(self) -> None:
        """Remember that the call was interrupted; release its frame.

        The frame holds the arguments of the call and all that was computed in it.
        """
        self._was_left, self._frame = True, None

    def end_if_left(self) -> bool:
        """End what was begun here if the call was interrupted; say whether it was.

        That alone: what was begun since then may be in order.
        """
        if self.is_under_way():
            return False
        self.leave()
        stack = _OPEN.stack
        for entry in stack:
            if entry[0] is self:
                _end_entry(entry, is_left=True)
                break
        return True


class Yielding(Call):
    """An owner whose region may be ended early, with the one that it was begun in."""


_OPEN = _Open()


def open_regions() -> list[Region]:
    """Return the regions that record on this thread now, outermost first."""
    return [region for _, region in _OPEN.stack if region is not None]


def is_recordable(name: str) -> bool:
    """Return whether a region makes sense here: autograd saves something.

    Raises:
        UnsupportedError: The code runs under a torch.func transform that cannot
            carry saved-tensor hooks.
    """
    if not records_gradients() or torch.compiler.is_compiling():
        return False
    refused = hooks_refused()
    if refused is not None:
        raise UnsupportedError(
            f"region {name!r} is entered where PyTorch allows no saved-tensor hooks "
            f"({refused}). Compute the gradient with torch.autograd.grad or backward, "
            "or disable the region inside the transform."
        )
    return True


def begin(
    owner: object,
    name: str,
    options: Options,
    key: Hashable,
    accounts: tuple[Account, ...] = (),
) -> Region | None:
    """Open a region on this thread, where there is something to do.

    Args:
        owner: Who begins it, and will end it.
        name: Its name in error messages and statistics.
        options: How saved tensors are treated.
        key: Identifies this region.
        accounts: The accounts that the region adds to.

    Returns:
        The region, or None where autograd saves nothing.
    """
    region = Region(name, options, key) if is_recordable(name) else None
    if region is not None:
        if not options.recompute and _OPEN.stack:
            region.around = tuple(open_regions())
        region.accounts = accounts
        for observer in observers():
            observer.began(region)
        for account in region.accounts:
            account.calls += 1
    entry = owner, region
    try:
        # Before anything is on torch's stacks: the next call finds it here.
        _OPEN.stack.append(entry)
        if region is not None:
            region.open(owner.end_if_left if isinstance(owner, Call) else None)
        return region
    except BaseException:
        _abandon(entry)
        raise


class _Ending:
    """The exit of a `with` statement on an owner.

    Only the statement refers to it. So its own end is that of the block, even if an
    interrupt comes at the very moment at which the region would be closed.
    """

    __slots__ = ("_leave", "_owner", "_place")

    def __init__(self, owner: object, leave: Callable[..., None]) -> None:
        self._place = depth()
        self._leave = leave
        self._owner = owner

    @leave_uncompiled
    def __call__(self, *error: Any) -> None:
        try:
            self._leave(self._owner, *error)
        except BaseException:
            abandon_from(self._owner, self._place)
            raise

    def __del__(self) -> None:
        owner = getattr(self, "_owner", None)
        if owner is not None:
            abandon_from(owner, self._place)


class _Exit:
    """Gives every `with` statement on an owner an `_Ending` of its own.

    Args:
        leave: The owner's method that ends the region, given the error of the block.
    """

    def __init__(self, leave: Callable[..., None]) -> None:
        self._leave = leave

    @leave_uncompiled
    def __get__(self, owner: object, kind: type) -> Any:
        if owner is None:
            return self._leave
        return _Ending(owner, self._leave)


if TYPE_CHECKING:

    def region_exit(leave: Callable[..., None]) -> Callable[..., None]:
        """Make an `__exit__` from a method that ends a region, given the error."""
        ...
else:
    region_exit = _Exit


class region:  # noqa: N801 (used as a verb: `with region(...):`)
    """Run the block in a region, where there is something to do."""

    __slots__ = ("_accounts", "_key", "_name", "_options")

    def __init__(
        self,
        name: str,
        options: Options,
        key: Hashable,
        accounts: tuple[Account, ...] = (),
    ) -> None:
        self._name = name
        self._options = options
        self._key = key
        self._accounts = accounts

    def __enter__(self) -> Region | None:
        return begin(self, self._name, self._options, self._key, self._accounts)

    def _leave(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        del kind, traceback
        if error is not None and not isinstance(error, Exception):
            end_inside(self)
        end(self)
        refuse_transform(self._name, error)

    __exit__ = region_exit(_leave)


def refuse_transform(name: str, error: BaseException | None) -> None:
    """Raise our error if torch refused a torch.func transform inside a region."""
    advice = transform_advice(name, error)
    if advice is not None:
        raise UnsupportedError(advice) from error


def transform_advice(name: str, error: BaseException | None) -> str | None:
    """Return what to do, if torch refused a torch.func transform inside a region."""
    if not isinstance(error, RuntimeError) or _TRANSFORM not in str(error):
        return None
    return (
        f"region {name!r} holds a torch.func transform that PyTorch does not let work "
        "with saved-tensor hooks. Move the transform out of the region, or use "
        "torch.autograd.grad inside it."
    )


def skip(owner: object) -> None:
    """Begin nothing, to be ended all the same."""
    _OPEN.stack.append((owner, None))


def end(owner: object) -> Region | None:
    """End what the owner began last on this thread; do nothing if it began nothing.

    Where that is no region, as of a disabled scope, all that was begun inside it and
    is still open stays open: regions of a plan may reach over its end.

    Returns:
        The region that was ended, if there was one.

    Raises:
        UsageError: Something else was begun since then and has not been ended.
    """
    stack = _OPEN.stack
    if not stack or stack[-1][0] is not owner:
        entry = next((each for each in reversed(stack) if each[0] is owner), None)
        if entry is None or entry[1] is None:
            _forget(entry)
            return None
        early = _end_inside(owner)
        if early:
            _pop()
            raise UsageError(
                "a checkpoint region is closed before one that was opened inside it, "
                "which is closed now as well. Close the inner one first, or use `with` "
                "blocks, which nest by themselves (but not those of two generators "
                "that take turns)."
            )
    return _pop()


def end_or_leave(owner: Call) -> None:
    """End what the owner began, in order or after an interrupt."""
    if not owner.end_if_left():
        end(owner)


def _end_inside(owner: object) -> bool:
    """End all inside what the owner began; say whether any of it had to stay open.

    Left open it would record for good: nothing might end it. Owners that began
    nothing, such as disabled scopes, may end when they like.
    """
    stack = _OPEN.stack
    early = False
    idle: list[tuple[object, Region | None]] = []
    while stack[-1][0] is not owner:
        inner, region = stack[-1]
        if isinstance(inner, Call) and inner.end_if_left():
            continue
        if region is None and not isinstance(inner, Yielding):
            idle.append(stack.pop())
            continue
        early = early or not isinstance(inner, Yielding)
        _pop()
    stack[-1:-1] = reversed(idle)
    return early


def _pop() -> Region | None:
    entry = _OPEN.stack[-1]
    _end_entry(entry)
    return entry[1]


def _end_entry(entry: Entry, *, is_left: bool = False) -> None:
    """Close a region; take it off the stack last, so that it cannot get lost."""
    try:
        _close(entry[1], is_left=is_left)
        _forget(entry)
    except BaseException:
        _abandon(entry)
        raise


def _abandon(entry: Entry) -> None:
    """End what an interrupt, or an error, kept from being opened or closed."""
    owner, region = entry
    if region is not None:
        region.abandon()
    if isinstance(owner, Call):
        owner.leave()
    _forget(entry)


def _forget(entry: Entry | None) -> None:
    stack = _OPEN.stack
    if stack and stack[-1] is entry:
        stack.pop()
    else:
        stack[:] = [other for other in stack if other is not entry]


def depth() -> int:
    """Return how much was begun on this thread and has not been ended."""
    return len(_OPEN.stack)


def end_inside(owner: object) -> None:
    """End all inside what the owner began last, after an exception that is no error."""
    for place, (other, _) in reversed(list(enumerate(_OPEN.stack))):
        if other is owner:
            end_above(place + 1)
            return


def end_above(place: int) -> None:
    """End what was begun at a depth and deeper, after an exception that is no error.

    Torch runs no hooks of a module then, so nothing else closes its region. What
    was computed in it may still be used: the exception may be caught. What is no call,
    or cannot be closed, is abandoned.
    """
    try:
        end_left(place)
    except Exception:  # noqa: BLE001 (of closing; the other one is being raised)
        pass
    finally:
        abandon_above(place)


def end_left(place: int) -> None:
    """End what interrupted calls have begun at a depth and deeper."""
    for owner, _ in reversed(_OPEN.stack[place:]):
        if isinstance(owner, Call):
            owner.end_if_left()


def abandon_above(place: int) -> None:
    """Abandon all that was begun at a depth and deeper."""
    for entry in reversed(_OPEN.stack[place:]):
        _abandon(entry)


def abandon_from(owner: object, place: int) -> None:
    """Abandon what the owner began at a depth, and all inside it, if it is there."""
    stack = _OPEN.stack
    if place < len(stack) and stack[place][0] is owner:
        abandon_above(place)


def _close(region: Region | None, *, is_left: bool = False) -> None:
    if region is not None:
        # What a region keeps to the end is none of a torch.func transform's tensors.
        with outside_transforms():
            region.close(is_left=is_left)
        for observer in observers():
            observer.ended(region)


def is_innermost(owner: object) -> bool:
    """Return whether no region is open inside what the owner began last.

    An owner that began nothing, such as a disabled scope, is not inside.
    """
    for other, region in reversed(_OPEN.stack):
        if other is owner:
            return True
        if region is not None:
            return False
    return False


def is_open(owner: object) -> bool:
    """Return whether what the owner began on this thread has not been ended."""
    return any(other is owner for other, _ in _OPEN.stack)

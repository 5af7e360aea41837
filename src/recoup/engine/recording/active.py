"""The stack of open regions of this thread; begin and end regions."""

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
"""An owner and its region, or None."""


class _Open(threading.local):
    """The open regions and owners of this thread."""

    def __init__(self) -> None:
        self.stack: list[Entry] = []


class Call:
    """An owner whose region is begun and ended by hooks of a module's call.

    Args:
        frame: The frame in which torch runs the hooks and forward, if known. Kept
            alive, because its id would be reused.
    """

    def __init__(self, frame: FrameType | None = None) -> None:
        self._frame = frame
        self._thread = threading.get_ident()
        self._was_left = False

    def is_under_way(self) -> bool:
        """Return whether the call is running, as far as this thread can tell."""
        if self._was_left:
            return False
        if self._frame is None or self._thread != threading.get_ident():
            return True
        return is_running(self._frame)

    def leave(self) -> None:
        """Record that the call was interrupted; release its frame.

        The frame holds the call's arguments and local variables.
        """
        self._was_left, self._frame = True, None

    def end_if_left(self) -> bool:
        """End this owner's entry if the call was interrupted; return whether it was.

        Entries above it may be valid and stay.
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
    """An owner whose region may end early, together with its enclosing region."""


_OPEN = _Open()


def open_regions() -> list[Region]:
    """Return the recording regions of this thread, outermost first."""
    return [region for _, region in _OPEN.stack if region is not None]


def is_recordable(name: str) -> bool:
    """Return whether autograd saves tensors here, so that a region makes sense.

    Raises:
        UnsupportedError: The code runs under a torch.func transform that does not
            support saved-tensor hooks.
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
    """Open a region on this thread, if autograd saves tensors.

    Args:
        owner: The object that will end it.
        name: Its name in error messages and statistics.
        options: The options of the region.
        key: Its identity for verification.
        accounts: The accounts that the region adds to.

    Returns:
        The region, or None if autograd saves nothing.
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
        # Before torch's stacks change, so that the next call can clean up.
        _OPEN.stack.append(entry)
        if region is not None:
            region.open(owner.end_if_left if isinstance(owner, Call) else None)
        return region
    except BaseException:
        _abandon(entry)
        raise


class _Ending:
    """The exit of a `with` statement on an owner.

    Only the statement refers to it. So it dies with the block, even if an interrupt
    comes just when the region would be closed.
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
    """A descriptor that gives every `with` statement on an owner a new `_Ending`.

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
        """Return an `__exit__` from a method that ends a region, given the error."""
        ...
else:
    region_exit = _Exit


class region:  # noqa: N801 (used as a verb: `with region(...):`)
    """Run the block in a region, if autograd saves tensors."""

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
    """Raise `UnsupportedError` if torch refused a torch.func transform in a region."""
    advice = transform_advice(name, error)
    if advice is not None:
        raise UnsupportedError(advice) from error


def transform_advice(name: str, error: BaseException | None) -> str | None:
    """Return advice if torch refused a torch.func transform inside a region."""
    if not isinstance(error, RuntimeError) or _TRANSFORM not in str(error):
        return None
    return (
        f"expected no torch.func transform in region {name!r}, got one: PyTorch "
        "refuses it under saved-tensor hooks; move it out of the region, or use "
        "torch.autograd.grad inside."
    )


def skip(owner: object) -> None:
    """Push an entry without region, which `end` removes."""
    _OPEN.stack.append((owner, None))


def end(owner: object) -> Region | None:
    """End the owner's last entry on this thread; do nothing if it has none.

    An entry without region, such as a disabled scope's, leaves inner entries open:
    regions of a plan may extend beyond it.

    Returns:
        The region that was ended, if there was one.

    Raises:
        UsageError: A region that was begun inside it is still open.
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
    """End the owner's entry, in order or after an interrupt."""
    if not owner.end_if_left():
        end(owner)


def _end_inside(owner: object) -> bool:
    """End all entries inside the owner's; return whether one had to end too early.

    Left open, such a region might record forever. Entries without region, such as
    disabled scopes, may end later.
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
    """Close a region; remove it from the stack last, so that it cannot get lost."""
    try:
        _close(entry[1], is_left=is_left)
        _forget(entry)
    except BaseException:
        _abandon(entry)
        raise


def _abandon(entry: Entry) -> None:
    """End an entry whose opening or closing failed or was interrupted."""
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
    """Return the number of open entries of this thread."""
    return len(_OPEN.stack)


def end_inside(owner: object) -> None:
    """End all entries inside the owner's last one, after an interrupt."""
    for place, (other, _) in reversed(list(enumerate(_OPEN.stack))):
        if other is owner:
            end_above(place + 1)
            return


def end_above(place: int) -> None:
    """End all entries from a depth on, after a `BaseException` that is no `Exception`.

    Torch runs no module hooks then, so nothing else closes their regions. Results may
    still be used if the exception is caught. Entries that belong to no call, or cannot
    be closed, are abandoned.
    """
    try:
        end_left(place)
    except Exception:  # noqa: BLE001 (of closing; the other one is being raised)
        pass
    finally:
        abandon_above(place)


def end_left(place: int) -> None:
    """End the entries of interrupted calls from a depth on."""
    for owner, _ in reversed(_OPEN.stack[place:]):
        if isinstance(owner, Call):
            owner.end_if_left()


def abandon_above(place: int) -> None:
    """Abandon all entries from a depth on."""
    for entry in reversed(_OPEN.stack[place:]):
        _abandon(entry)


def abandon_from(owner: object, place: int) -> None:
    """Abandon the owner's entry at a depth, and all inside it, if it exists."""
    stack = _OPEN.stack
    if place < len(stack) and stack[place][0] is owner:
        abandon_above(place)


def _close(region: Region | None, *, is_left: bool = False) -> None:
    if region is not None:
        # Tensors that a region keeps must not be wrapped by a torch.func transform.
        with outside_transforms():
            region.close(is_left=is_left)
        for observer in observers():
            observer.ended(region)


def is_innermost(owner: object) -> bool:
    """Return whether no region is open inside the owner's last entry.

    Entries without region, such as disabled scopes, do not count.
    """
    for other, region in reversed(_OPEN.stack):
        if other is owner:
            return True
        if region is not None:
            return False
    return False


def is_open(owner: object) -> bool:
    """Return whether the owner has an open entry on this thread."""
    return any(other is owner for other, _ in _OPEN.stack)

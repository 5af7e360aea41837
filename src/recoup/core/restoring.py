"""Cleanup that no interrupt can skip."""

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol


class _Thread(threading.local):
    """State to restore on this thread, outermost first."""

    def __init__(self) -> None:
        self.entered: list[weakref.ref[restoring]] = []


_THREAD = _Thread()


class restoring:  # noqa: N801 (used as a verb: `with restoring(...):`)
    """Call `restore` at the end of the block, also if an interrupt comes just then.

    `try` and `finally` have gaps, before the first line of each: an interrupt there
    skips the cleanup, and one inside it cuts it short. Here the next one around it
    does what was skipped before it restores its own; without one around, the object
    does it when it dies, with the traceback of the interrupt.

    Subclasses change things in `__enter__`, after calling this one.

    Args:
        restore: Puts things back; calling it twice does no harm.

    Examples:
        >>> found = []
        >>> with restoring(lambda: found.append("restored")):
        ...     found.append("block")
        >>> found
        ['block', 'restored']
    """

    __slots__ = ("__weakref__", "_place", "is_due", "restore")

    def __init__(self, restore: Callable[[], object]) -> None:
        self.restore = restore
        self.is_due = False

    def __enter__(self) -> Any:
        """Be due from now on."""
        entered = _THREAD.entered
        while entered and entered[-1]() is None:
            entered.pop()
        self._place = len(entered)
        entered.append(weakref.ref(self))
        self.is_due = True

    def __exit__(self, *error: object) -> None:
        """Restore what was skipped inside, then this."""
        entered = _THREAD.entered
        place = self._place
        if place < len(entered) and entered[place]() is self:
            while len(entered) > place + 1:
                inner = entered[-1]()
                if inner is not None:
                    inner.finish()
                entered.pop()
            # As `finish` does: replays wait for this.
            try:
                self.restore()
            except Exception:
                self.is_due = False
                raise
            self.is_due = False
            entered.pop()
        else:  # one around it was first, or it ends on another thread
            self.finish()

    def finish(self) -> None:
        """Restore if that is due; an error of `restore` itself is for the caller."""
        if self.is_due:
            try:
                self.restore()
            except Exception:
                self.is_due = False
                raise
            self.is_due = False

    def __del__(self) -> None:
        if getattr(self, "is_due", False):
            self.restore()


class Removable(Protocol):
    """A handle of something that can be taken off, more than once."""

    def remove(self) -> object:
        """Take it off."""
        ...


class removing(restoring):  # noqa: N801 (used as a verb: `with removing() as handles:`)
    """Give a list for handles of hooks; call `remove` of each at the end of the block.

    Append a handle on the line that registers its hook: an interrupt comes between
    lines.
    """

    __slots__ = ("_handles",)

    def __init__(self) -> None:
        handles: list[Removable] = []
        super().__init__(partial(_remove_all, handles))
        self._handles = handles

    def __enter__(self) -> list[Removable]:
        super().__enter__()
        return self._handles


def _remove_all(handles: list[Removable]) -> None:
    for handle in reversed(handles):
        handle.remove()

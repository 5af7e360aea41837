"""Cleanup that no interrupt can skip."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from operator import call
from typing import Any, Protocol


class _Entered(threading.local):
    """State to restore on this thread, outermost first."""

    def __init__(self) -> None:
        self.entered: list[weakref.ref[restoring]] = []


_THREAD = _Entered()


class restoring:  # noqa: N801 (used as a verb: `with restoring(...):`)
    """Call `restore` at the end of the block, even if an interrupt arrives there.

    `try` and `finally` have gaps before the first line of each: an interrupt there
    skips the cleanup, and one inside the cleanup cuts it short. Here the enclosing
    `restoring` makes up for it before it restores its own state; without one, the
    object does so when it dies, with the traceback of the interrupt.

    Subclasses change state in `__enter__`, after calling this one.

    Args:
        restore: Restores the state; must be idempotent.

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
        """Mark the cleanup as due."""
        entered = _THREAD.entered
        while entered and entered[-1]() is None:
            entered.pop()
        self._place = len(entered)
        entered.append(weakref.ref(self))
        self.is_due = True

    def __exit__(self, *error: object) -> None:
        """Do skipped cleanups inside, then this one."""
        entered = _THREAD.entered
        place = self._place
        if place < len(entered) and entered[place]() is self:
            while len(entered) > place + 1:
                inner = entered[-1]()
                if inner is not None:
                    inner.finish()
                entered.pop()
            # The body of `finish`, inlined: this is on the path of replays.
            try:
                self.restore()
            except Exception:
                self.is_due = False
                raise
            self.is_due = False
            entered.pop()
        else:  # an enclosing one was first, or it ends on another thread
            self.finish()

    def finish(self) -> None:
        """Restore if due; an error of `restore` itself is raised to the caller."""
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


def refill(container: Any, items: Iterable[Any], kind: type | None = None) -> None:
    """Replace the contents of a container; no interrupt finds it partly filled.

    Python delivers interrupts between its own instructions, and this is one call of C,
    unless a key's `__hash__` is Python code.

    Args:
        container: A dictionary, set or deque.
        items: The new contents: pairs of key and value for a dictionary.
        kind: The class whose methods are used; default: that of the container. Pass the
            base class where a subclass may override them.

    Examples:
        >>> numbers = {1: "one", 2: "two"}
        >>> refill(numbers, [(3, "three")])
        >>> numbers
        {3: 'three'}
    """
    methods: Any = kind or type(container)
    fill = methods.extend if hasattr(methods, "extend") else methods.update
    contents = list(items)
    steps = partial(methods.clear, container), partial(fill, container, contents)
    deque(map(call, steps), maxlen=0)


class Removable(Protocol):
    """A handle whose `remove` may be called more than once."""

    def remove(self) -> object:
        """Remove the hook."""
        ...


class removing(restoring):  # noqa: N801 (used as a verb: `with removing() as handles:`)
    """Return a list for hook handles; remove each of them at the end of the block.

    Append a handle on the line that registers its hook: interrupts arrive between
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

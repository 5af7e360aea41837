"""Calls that an interrupt ended: their regions are closed when the next call begins.

After an exception torch runs a module's hooks that are always called, but not after a
`KeyboardInterrupt`. What such a call began would stay open and record for good.
"""

import sys
import threading

from recoup.engine.recording.active import Call


class _Calls(threading.local):
    """The running calls of this thread, and their owners."""

    def __init__(self) -> None:
        self.stack: list[tuple[Call, object]] = []


_CALLS = _Calls()


def call_of_hook() -> Call:
    """Return the call that a module's hook runs in, who begins something there."""
    # Two up is torch's frame that runs the hooks and then forward.
    return Call(sys._getframe(2))  # noqa: SLF001 (of Python)


def begin_call(owner: Call, caller: object) -> None:
    """Record a call, from a module's hook.

    Costs nothing but the note, unless it is inside another call: then a walk through
    the frames that are running.

    Args:
        owner: The result of `call_of_hook`. Its maker lets it leave when an
            interrupt comes from here: the note would keep its frame.
        caller: Whose call it is.
    """
    if _CALLS.stack:
        end_interrupted_calls()
    _CALLS.stack.append((owner, caller))


def end_call(caller: object) -> object:
    """Record the end of the last call; return the owners that began in it."""
    if not _CALLS.stack:
        return caller
    return _CALLS.stack.pop()[0]


def is_calling(caller: object) -> bool:
    """Return whether a call of this owner is running on this thread."""
    return any(other is caller for _, other in _CALLS.stack)


def end_interrupted_calls() -> None:
    """End what was begun in calls that are no longer running."""
    while _CALLS.stack and not _CALLS.stack[-1][0].is_under_way():
        _CALLS.stack.pop()[0].end_if_left()

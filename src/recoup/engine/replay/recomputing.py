"""Whether a replay runs on this thread now."""

from contextlib import AbstractContextManager
from threading import RLock, get_ident
from time import perf_counter
from typing import Any

from recoup.backend.compiler.recognition import leave_uncompiled

_RUNNING: dict[int, Any] = {}
"""A lock for each thread, which is taken while a replay runs there. Nobody waits for
it: it is what Python takes and leaves in one step, whatever interrupts the thread."""

SECONDS: dict[int, float] = {}
"""How long replays took, by thread; empty until somebody asks, and nothing is counted
before that."""


@leave_uncompiled
def is_recomputing() -> bool:
    """Return whether recoup is recomputing something on this thread right now.

    User code runs once, in forward, so it sees False there. It sees True where it is
    called by a replay: in a kernel of a custom operator, in a dispatch mode, and in a
    function that is run again because it cannot be recorded.

    Examples:
        >>> is_recomputing()
        False
    """
    lock = _RUNNING.get(get_ident())
    return lock is not None and lock._is_owned()  # noqa: SLF001 (of Python)


def replay_seconds() -> float:
    """Return how long replays have taken since somebody asked first, on the host.

    On an accelerator the host only hands out the work: there it is the time that
    handing out takes.

    Examples:
        >>> before, start = replay_seconds(), perf_counter()
        >>> with recomputing(), recomputing():
        ...     is_recomputing()
        True
        >>> _ = count_replay_seconds(start)
        >>> replay_seconds() > before
        True
    """
    SECONDS.setdefault(-1, 0.0)  # no thread's
    return sum(list(SECONDS.values()))


def recomputing() -> AbstractContextManager[object]:
    """Return what says that the block of a `with` statement is a replay.

    Of the statement itself: what else enters it may be interrupted before it can leave.
    """
    thread = get_ident()
    return _RUNNING.get(thread) or _RUNNING.setdefault(thread, RLock())


def count_replay_seconds(start: float) -> float:
    """Count the time since the start of a replay that is over; return it."""
    # As a sum for each thread: no lock that others could wait for.
    thread, seconds = get_ident(), perf_counter() - start
    SECONDS[thread] = SECONDS.get(thread, 0.0) + seconds
    return seconds

"""Track whether a replay is running on this thread, and its time."""

from contextlib import AbstractContextManager
from threading import RLock, get_ident
from time import perf_counter
from typing import Any

from recoup.backend.compiler.recognition import leave_uncompiled

_RUNNING: dict[int, Any] = {}
"""A lock for each thread, held while a replay runs there. Nothing waits for it: a lock
is used because Python acquires and releases it atomically, despite interrupts."""

SECONDS: dict[int, float] = {}
"""The time of replays by thread; empty, and not counted, before the first query."""


@leave_uncompiled
def is_recomputing() -> bool:
    """Return whether recoup is recomputing on this thread.

    User code usually runs once, in forward, and sees False. It sees True when a replay
    calls it: in a custom operator's kernel, a dispatch mode, or a function that is
    rerun because it cannot be recorded.

    Examples:
        >>> is_recomputing()
        False
    """
    lock = _RUNNING.get(get_ident())
    return lock is not None and lock._is_owned()  # noqa: SLF001 (of Python)


def replay_seconds() -> float:
    """Return the host time of replays since the first query.

    On an accelerator this is the launch time only.

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
    """Return a context manager that marks its block as a replay.

    Use it directly in a `with` statement: other code might be interrupted before it can
    leave.
    """
    thread = get_ident()
    return _RUNNING.get(thread) or _RUNNING.setdefault(thread, RLock())


def count_replay_seconds(start: float) -> float:
    """Add the time since the start of a finished replay; return it."""
    # Per thread, so that no lock is needed.
    thread, seconds = get_ident(), perf_counter() - start
    SECONDS[thread] = SECONDS.get(thread, 0.0) + seconds
    return seconds

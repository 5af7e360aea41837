"""Whether a replay runs on this thread now."""

import threading
from time import perf_counter


class _Depth(threading.local):
    depth = 0
    started = 0.0


class _Clock:
    """Adds up the time that replays take on all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        with self._lock:
            self.seconds += seconds


_DEPTH = _Depth()
_CLOCK = _Clock()


def is_recomputing() -> bool:
    """Return whether recoup is recomputing something on this thread right now.

    User code runs once, in forward, so it sees False there. It sees True where it is
    called by a replay: in a kernel of a custom operator, in a dispatch mode, and in a
    function that is run again because it cannot be recorded.

    Examples:
        >>> is_recomputing()
        False
    """
    return _DEPTH.depth > 0


def replay_seconds() -> float:
    """Return how long all replays of this process have taken so far, on the host.

    On an accelerator the host only hands out the work: there it is the time that
    handing out takes.

    Examples:
        >>> before = replay_seconds()
        >>> with recomputing(), recomputing():
        ...     pass
        >>> replay_seconds() > before
        True
    """
    return _CLOCK.seconds


class recomputing:  # noqa: N801 (used as a verb: `with recomputing():`)
    """Say that the block is a replay."""

    __slots__ = ()

    def __enter__(self) -> None:
        depth = _DEPTH.depth
        if not depth:
            _DEPTH.started = perf_counter()
        _DEPTH.depth = depth + 1

    def __exit__(self, *error: object) -> None:
        depth = _DEPTH.depth = _DEPTH.depth - 1
        if not depth:
            _CLOCK.add(perf_counter() - _DEPTH.started)

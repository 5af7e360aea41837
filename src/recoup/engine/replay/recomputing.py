"""Whether a replay runs on this thread now."""

import threading
import weakref
from time import perf_counter


class _Thread(threading.local):
    replays: "tuple[weakref.ref[recomputing], ...]" = ()


class _Clock:
    """Adds up the time that replays take on all threads.

    Each thread has its own sum, so there is no lock that an interrupt could leave
    taken.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def add(self, seconds: float) -> None:
        thread = threading.get_ident()
        self._seconds[thread] = self._seconds.get(thread, 0.0) + seconds

    @property
    def seconds(self) -> float:
        return sum(list(self._seconds.values()))


_THREAD = _Thread()
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
    return any(ref() is not None for ref in _THREAD.replays)


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
    """Say that the block is a replay.

    Only the `with` of the block refers to it, so that a replay that is interrupted
    does not count any more, even if that happens in `__exit__`.
    """

    __slots__ = ("__weakref__", "_started")

    def __enter__(self) -> None:
        running = [ref for ref in _THREAD.replays if ref() is not None]
        self._started = None if running else perf_counter()
        _THREAD.replays = (*running, weakref.ref(self))

    def __exit__(self, *error: object) -> None:
        _THREAD.replays = _THREAD.replays[:-1]
        if self._started is not None:
            _CLOCK.add(perf_counter() - self._started)

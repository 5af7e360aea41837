"""Whether a replay runs on this thread now."""

import threading
import weakref
from threading import get_ident
from time import perf_counter


class _Thread(threading.local):
    replays: "tuple[weakref.ref[recomputing], ...]" = ()


_THREAD = _Thread()
_SECONDS: dict[int, float] = {}
"""How long replays took, by thread."""


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
    return sum(list(_SECONDS.values()))


class recomputing:  # noqa: N801 (used as a verb: `with recomputing():`)
    """Say that the block is a replay.

    Only the `with` of the block refers to it, so that a replay that is interrupted
    does not count any more, even if that happens in `__exit__`.
    """

    __slots__ = ("__weakref__", "_around", "_started")

    def __enter__(self) -> None:
        running = _THREAD.replays
        if running:
            running = tuple(ref for ref in running if ref() is not None)
        self._around = running
        self._started = None if running else perf_counter()
        _THREAD.replays = (*running, weakref.ref(self))

    def __exit__(self, *error: object) -> None:
        _THREAD.replays = self._around
        if self._started is not None:
            # As a sum for each thread: no lock that an interrupt could leave taken.
            thread, seconds = get_ident(), perf_counter() - self._started
            _SECONDS[thread] = _SECONDS.get(thread, 0.0) + seconds

"""Whether a replay runs on this thread now."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_DEPTH = threading.local()


def is_recomputing() -> bool:
    """Return whether recoup is recomputing something on this thread right now.

    User code runs once, in forward, so it sees False there. It sees True where it is
    called by a replay: in a kernel of a custom operator, in a dispatch mode, and in a
    function that is run again because it cannot be recorded.

    Examples:
        >>> is_recomputing()
        False
    """
    return getattr(_DEPTH, "depth", 0) > 0


@contextmanager
def recomputing() -> Iterator[None]:
    """Say that the block is a replay."""
    _DEPTH.depth = getattr(_DEPTH, "depth", 0) + 1
    try:
        yield
    finally:
        _DEPTH.depth -= 1

"""Whether a replay runs on this thread now."""

import threading


class _Depth(threading.local):
    depth = 0


_DEPTH = _Depth()


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


class recomputing:  # noqa: N801 (used as a verb: `with recomputing():`)
    """Say that the block is a replay."""

    __slots__ = ()

    def __enter__(self) -> None:
        _DEPTH.depth += 1

    def __exit__(self, *error: object) -> None:
        _DEPTH.depth -= 1

"""Readings: what may come out of a file that anybody may have written.

Text from a file is shown in terminals and pages, and amounts are added up and drawn:
neither is to do more than that.
"""

from typing import Any, TypeGuard

MOST = 1 << 63
"""More bytes, seconds or counts than any machine has; sums of them are still finite."""


def is_printable(found: Any) -> TypeGuard[str]:
    r"""Return whether something is text that a terminal shows and does not obey.

    Examples:
        >>> is_printable("h.0.größe"), is_printable(""), is_printable(3)
        (True, True, False)
        >>> is_printable("\x1b[2J"), is_printable("a\nb"), is_printable("\ud800")
        (False, False, False)
    """
    return isinstance(found, str) and found.isprintable()


def is_amount(found: Any) -> TypeGuard[int]:
    """Return whether something is a whole number of bytes, or a count.

    Examples:
        >>> is_amount(0), is_amount(-5), is_amount(10**400), is_amount(True)
        (True, False, False, False)
    """
    is_whole = isinstance(found, int) and not isinstance(found, bool)
    return is_whole and 0 <= found <= MOST


def is_duration(found: Any) -> TypeGuard[float]:
    """Return whether something is a number of seconds.

    Examples:
        >>> is_duration(0.5), is_duration(2), is_duration(-1.0), is_duration(1e300)
        (True, True, False, False)
        >>> is_duration(float("nan")), is_duration(True)
        (False, False)
    """
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return is_number and 0 <= found <= MOST

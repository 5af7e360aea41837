"""Parse and print amounts of memory, budgets and durations; bytes are integers."""

import math
import re
from numbers import Integral, Real
from typing import Any

from recoup.errors import UsageError

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL_UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "EB")
_BYTES_PER_UNIT = {
    spelling.lower(): base**power
    for base, units in ((1024, _BINARY_UNITS), (1000, _DECIMAL_UNITS))
    for power, unit in enumerate(units)
    # With or without the B, as Kubernetes and Docker have it: 8Gi, 8G.
    for spelling in ({unit, unit.removesuffix("B")} if power else {unit})
}
# Forty digits are far beyond any memory and below Python's own limit on the
# digits it turns into an integer, which would surface as a foreign error.
_AMOUNT = re.compile(
    r"([0-9]{1,40})(?:\.([0-9]{1,40}))?(?:e\+?([0-9]{1,2}))?\s*([a-z]*|%)",
    re.IGNORECASE,
)
_LEAST_FLOAT_BYTES = 1000
_HOW_TO_WRITE = (
    "Write bytes as a number, such as 1024, or as a number with a unit, such as "
    "'1.5 MB' (1000 x 1000), '8G' (the same as '8GB') or '7.91GiB' "
    "(1024 x 1024 x 1024)."
)
_HOW_TO_WRITE_SHARE = (
    "Write a share of the plain peak as a number with a point, such as 0.6, or as "
    "'60%'."
)


def parse_bytes(amount: int | str) -> int:
    """Return an amount of memory in whole bytes, rounded down.

    `KB MB GB TB PB EB` are powers of 1000, `KiB MiB GiB TiB PiB EiB` powers of 1024, in
    upper or lower case, with or without the `B`; a number alone is bytes.

    Raises:
        UsageError: The amount is not a number with a known unit, or is negative.

    Examples:
        >>> parse_bytes("8GiB"), parse_bytes("8Gi"), parse_bytes("8G")
        (8589934592, 8589934592, 8000000000)
        >>> parse_bytes("1.5 MB"), parse_bytes("7.91GiB"), parse_bytes(1024)
        (1500000, 8493297827, 1024)
    """
    if isinstance(amount, str):
        return _parse_text(amount)
    # A bool is an int to Python; to a reader it is a mistake.
    if not isinstance(amount, int) or isinstance(amount, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _unreadable(amount, f"it is of type {type(amount).__name__}")
    if amount < 0:
        raise _unreadable(amount, "it is negative")
    return amount


def parse_budget(budget: str | float) -> int | float:
    """Return a budget: an int is bytes, a float is a share of the plain peak.

    A text has the meaning of the same number in Python: with a point and without a unit
    it is a share if it is at most 1. Floats of 1000 and more are bytes.

    Raises:
        UsageError: It is neither, or is not positive.

    Examples:
        >>> parse_budget("60%"), parse_budget("0.6"), parse_budget(0.6)
        (0.6, 0.6, 0.6)
        >>> parse_budget("8 GB"), parse_budget(8e9), parse_budget("8e9")
        (8000000000, 8000000000, 8000000000)
        >>> parse_budget("120%")
        Traceback (most recent call last):
        recoup.errors.UsageError: expected a share above 0% and up to 100% for ...
    """
    given: Any = budget
    found: int | float
    if isinstance(given, str):
        share = _share_in(given)
        found = parse_bytes(given) if share is None else share
    elif isinstance(given, bool) or not isinstance(given, Real):
        raise UsageError(
            f"expected a budget, got {given!r} of type {type(given).__name__}. "
            f"{_HOW_TO_WRITE} {_HOW_TO_WRITE_SHARE}"
        )
    elif isinstance(given, Integral):
        found = int(given)
    else:
        found = float(given)
        if math.isfinite(found) and found >= _LEAST_FLOAT_BYTES:
            found = int(found)
    if isinstance(found, float) and not 0 < found <= 1:
        is_percent = isinstance(given, str) and "%" in given
        bounds = "0% and up to 100%" if is_percent else "0 and up to 1"
        raise UsageError(
            f"expected a share above {bounds} for a budget, got {given!r}. "
            f"{_HOW_TO_WRITE_SHARE} "
            f"{_HOW_TO_WRITE}"
        )
    if found <= 0:
        raise UsageError(
            f"expected a positive budget, got {given!r}. {_HOW_TO_WRITE} "
            f"{_HOW_TO_WRITE_SHARE}"
        )
    return found


def print_bytes(amount_bytes: int) -> str:
    """Return bytes in the largest unit of 1024 that fits, to two decimals.

    Examples:
        >>> print_bytes(1536 * 1024**2)
        '1.5 GiB'
        >>> print_bytes(1000)
        '1000 B'
        >>> print_bytes(-(2**20))
        '-1 MiB'
    """
    if amount_bytes < 0:
        return "-" + print_bytes(-amount_bytes)
    power, hundredths = 0, 100 * amount_bytes
    # 1023.995 MiB would round to 1024 MiB, so the unit is chosen after rounding.
    while hundredths >= 100 * 1024 and power < len(_BINARY_UNITS) - 1:
        power += 1
        hundredths = _divide_to_nearest(100 * amount_bytes, 1024**power)
    whole, rest = divmod(hundredths, 100)
    number = f"{whole}.{rest:02d}".rstrip("0").rstrip(".")
    return f"{number} {_BINARY_UNITS[power]}"


def print_seconds(seconds: float) -> str:
    """Return a duration in the unit that suits it, to three significant digits.

    A minute and more is given in whole seconds, an hour and more in whole minutes.

    Examples:
        >>> print_seconds(0.01234)
        '12.3 ms'
        >>> print_seconds(1.5)
        '1.5 s'
        >>> print_seconds(3725)
        '1 h 2 min'
    """
    if seconds < 0:
        return "-" + print_seconds(-seconds)
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if round(seconds, 1) >= 60:
        return _print_long(seconds)
    for scale, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        number = float(f"{seconds * scale:.3g}")
        if number >= 1 or seconds == 0:
            return f"{number:g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _parse_text(text: str) -> int:
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise _unreadable(text, "it is not a number with a unit")
    whole, decimals, exponent, unit = match[1], match[2] or "", match[3], match[4]
    if unit == "%":
        raise _unreadable(text, "it is a share, not bytes")
    factor = _BYTES_PER_UNIT.get(unit.lower() or "b")
    if factor is None:
        raise _unreadable(text, f"there is no unit {unit!r}")
    digits = int(whole + decimals) * 10 ** int(exponent or 0)
    return digits * factor // 10 ** len(decimals)


def _share_in(text: str) -> float | None:
    """Return the share that a text gives, of any size; None if it gives no share."""
    stripped = text.strip()
    if "%" in stripped:
        try:
            return float(stripped.removesuffix("%")) / 100
        except ValueError:
            return 0.0
    match = _AMOUNT.fullmatch(stripped)
    if match is None or match[2] is None or match[4] or match[3]:
        return None
    share = float(stripped)
    return None if share >= _LEAST_FLOAT_BYTES else share


def _unreadable(amount: object, reason: str) -> UsageError:
    return UsageError(
        f"expected an amount of memory, got {amount!r}: {reason}. {_HOW_TO_WRITE}"
    )


def _divide_to_nearest(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)


def _print_long(seconds: float) -> str:
    total_seconds, total_minutes = round(seconds), round(seconds / 60)
    if total_seconds < 3600:
        larger, smaller, units = *divmod(total_seconds, 60), ("min", "s")
    else:
        larger, smaller, units = *divmod(total_minutes, 60), ("h", "min")
    tail = f" {smaller} {units[1]}" if smaller else ""
    return f"{larger} {units[0]}{tail}"

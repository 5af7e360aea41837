"""Parse and print amounts of memory and time, bytes in exact integers."""

import math
import re

from recoup.core.errors import UsageError

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL_UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "EB")
_BYTES_PER_UNIT = {
    unit.lower(): base**power
    for base, units in ((1024, _BINARY_UNITS), (1000, _DECIMAL_UNITS))
    for power, unit in enumerate(units)
}
# Forty digits are far beyond any memory and below Python's own limit on the
# digits it turns into an integer, which would surface as a foreign error.
_AMOUNT = re.compile(r"([0-9]{1,40})(?:\.([0-9]{1,40}))?\s*([a-z]*)", re.IGNORECASE)
_HOW_TO_WRITE = (
    "Write a whole number of bytes, or a number with a unit, "
    "such as 1024, '1.5 MB' (1000 x 1000) or '8GiB' (1024 x 1024 x 1024)."
)


def parse_bytes(amount: int | str) -> int:
    """Return an amount of memory as a whole number of bytes, without rounding.

    `KB MB GB TB PB EB` are powers of 1000, `KiB MiB GiB TiB PiB EiB` powers of
    1024, in upper or lower case; a number alone is bytes.

    Raises:
        UsageError: The amount is not a number with a known unit, is negative, or
            is not a whole number of bytes.

    Examples:
        >>> parse_bytes("8GiB")
        8589934592
        >>> parse_bytes("1.5 MB")
        1500000
        >>> parse_bytes(1024)
        1024
    """
    if isinstance(amount, str):
        return _parse_text(amount)
    # A bool is an int to Python; to a reader it is a mistake.
    if not isinstance(amount, int) or isinstance(amount, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _unreadable(amount, f"it is of type {type(amount).__name__}")
    if amount < 0:
        raise _unreadable(amount, "it is negative")
    return amount


def parse_share(text: str) -> float | None:
    """Return the share that a text in percent says, or None if it is not in percent.

    Raises:
        UsageError: It is not above 0% and up to 100%.

    Examples:
        >>> parse_share("60%"), parse_share("12.5 %"), parse_share("8GiB")
        (0.6, 0.125, None)
        >>> parse_share("120%")
        Traceback (most recent call last):
        recoup.core.errors.UsageError: a share is above 0% and up to 100%: got '120%'.
    """
    number, sign, rest = text.partition("%")
    if not sign:
        return None
    try:
        share = float(number) / 100
    except ValueError:
        share = 0.0
    if rest.strip() or not 0 < share <= 1:
        raise UsageError(f"a share is above 0% and up to 100%: got {text!r}.")
    return share


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
    whole, decimals, unit = match[1], match[2] or "", match[3]
    factor = _BYTES_PER_UNIT.get(unit.lower() or "b")
    if factor is None:
        raise _unreadable(text, f"there is no unit {unit!r}")
    amount_bytes, rest = divmod(int(whole + decimals) * factor, 10 ** len(decimals))
    if rest:
        reason = f"it is not a whole number of bytes (the next below is {amount_bytes})"
        raise _unreadable(text, reason)
    return amount_bytes


def _unreadable(amount: object, reason: str) -> UsageError:
    return UsageError(
        f"an amount of memory is needed, found {amount!r}: {reason}. {_HOW_TO_WRITE}"
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

"""Bytes and seconds: parsing is exact, printing is rounded and readable."""

import math
import re
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recoup.core.units import parse_budget, parse_bytes, print_bytes, print_seconds
from recoup.errors import UsageError

BINARY = {"B": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4, "PiB": 5, "EiB": 6}
DECIMAL = {"KB": 1, "MB": 2, "GB": 3, "TB": 4, "PB": 5, "EB": 6}
FACTORS = {
    **{unit: 1024**power for unit, power in BINARY.items()},
    **{unit: 1000**power for unit, power in DECIMAL.items()},
}
SECONDS_PER_UNIT = {"h": 3600, "min": 60, "s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}

amounts = st.integers(0, 2**70)
units = st.sampled_from(sorted(FACTORS))


def printed_value(text: str) -> Fraction:
    """Return the number of bytes in a text of `print_bytes`."""
    number, unit = text.split(" ")
    return Fraction(number) * FACTORS[unit]


def printed_seconds(text: str) -> float:
    words = text.split(" ")
    pairs = zip(words[::2], words[1::2], strict=True)
    return sum(float(number) * SECONDS_PER_UNIT[unit] for number, unit in pairs)


@pytest.mark.parametrize(
    ("text", "amount_bytes"),
    [
        ("0", 0),
        ("1024", 1024),
        ("8GiB", 8 * 2**30),
        ("8gib", 8 * 2**30),
        (" 8 GiB ", 8 * 2**30),
        ("1.5 MB", 1_500_000),
        ("0.5KiB", 512),
        ("7B", 7),
        ("3.000 B", 3),
        ("2 eb", 2 * 10**18),
        ("7.91GiB", 8_493_297_827),
        ("0.1 GiB", 107_374_182),
        ("8G", 8 * 10**9),
        ("8 g", 8 * 10**9),
        ("8Gi", 8 * 2**30),
        ("512Mi", 2**29),
        ("8e9", 8 * 10**9),
        ("1.5e3 KiB", 1500 * 1024),
    ],
)
def test_known_amounts_are_parsed(text, amount_bytes):
    assert parse_bytes(text) == amount_bytes


@given(amounts)
def test_a_plain_number_is_bytes(amount_bytes):
    assert parse_bytes(amount_bytes) == amount_bytes
    assert parse_bytes(str(amount_bytes)) == amount_bytes


@given(st.integers(0, 10**6), units, st.sampled_from(["", " "]))
def test_a_number_with_a_unit_is_their_product(number, unit, space):
    assert parse_bytes(f"{number}{space}{unit}") == number * FACTORS[unit]


@given(st.integers(0, 10**9), st.integers(0, 12), units)
def test_decimals_are_rounded_down_to_whole_bytes(digits, places, unit):
    number = Fraction(digits, 10**places)
    whole, rest = divmod(digits, 10**places)
    text = f"{whole}.{rest:0{places}d}{unit}" if places else f"{whole}{unit}"
    assert parse_bytes(text) == math.floor(number * FACTORS[unit])


@given(st.integers(0, 10**6), st.sampled_from(sorted(set(FACTORS) - {"B"})))
def test_a_unit_means_the_same_without_its_b(number, unit):
    assert parse_bytes(f"{number}{unit[:-1]}") == number * FACTORS[unit]


@pytest.mark.parametrize(
    ("amount", "reason"),
    [
        ("", "not a number with a unit"),
        ("eight", "not a number with a unit"),
        ("GiB", "not a number with a unit"),
        ("-1GiB", "not a number with a unit"),
        ("1,5GB", "not a number with a unit"),
        ("1.GB", "not a number with a unit"),
        (".5GB", "not a number with a unit"),
        ("٣", "not a number with a unit"),
        ("9" * 5000, "not a number with a unit"),
        ("8 gigs", "no unit 'gigs'"),
        ("60%", "it is a share"),
        ("1e-9", "not a number with a unit"),
        (-1, "negative"),
        (1.5, "of type float"),
        (2.0, "of type float"),
        (True, "of type bool"),
        (None, "of type NoneType"),
    ],
)
def test_invalid_amounts_are_refused_with_the_reason(amount, reason):
    with pytest.raises(UsageError, match=reason) as caught:
        parse_bytes(amount)
    message = str(caught.value)
    assert f"expected an amount of memory, got {amount!r}" in message
    assert "Write bytes as a number" in message


@given(st.text(max_size=12))
def test_any_text_is_parsed_or_refused_with_our_error(text):
    try:
        amount_bytes = parse_bytes(text)
    except UsageError:
        return
    assert amount_bytes >= 0


@pytest.mark.parametrize(
    ("amount_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1 MiB"),
        (1023 * 2**20, "1023 MiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**30 + 2**23, "1.01 GiB"),
        (-3 * 2**29, "-1.5 GiB"),
        (5000 * 2**60, "5000 EiB"),
    ],
)
def test_known_amounts_are_printed(amount_bytes, text):
    assert print_bytes(amount_bytes) == text


@given(st.integers(1, 1023), st.sampled_from(sorted(BINARY)))
def test_whole_units_round_trip_through_print_and_parse(number, unit):
    assert parse_bytes(print_bytes(number * FACTORS[unit])) == number * FACTORS[unit]


@given(st.integers(0, 4 * 1023), st.sampled_from(sorted(set(BINARY) - {"B"})))
def test_quarters_of_a_unit_round_trip_through_print_and_parse(quarters, unit):
    amount_bytes = quarters * FACTORS[unit] // 4
    assert parse_bytes(print_bytes(amount_bytes)) == amount_bytes


@given(amounts)
@example(2**20 - 1)
@example(2**30 - 1)
def test_the_printed_number_is_the_nearest_with_two_decimals(amount_bytes):
    text = print_bytes(amount_bytes)
    unit_bytes = FACTORS[text.split(" ")[1]]
    assert abs(printed_value(text) - amount_bytes) <= Fraction(unit_bytes, 200)


@given(st.integers(1, 2**70))
@example(2**20 - 1)
@example(2**30 - 1)
def test_the_printed_number_stays_between_one_and_1024(amount_bytes):
    number, unit = print_bytes(amount_bytes).split(" ")
    assert Fraction(number) >= 1
    assert Fraction(number) < 1024 or unit == "EiB"


@given(amounts, amounts)
def test_more_bytes_never_print_as_fewer(first, second):
    lower, upper = sorted((first, second))
    assert printed_value(print_bytes(lower)) <= printed_value(print_bytes(upper))


@given(amounts)
def test_a_difference_prints_with_its_sign(amount_bytes):
    text = print_bytes(amount_bytes)
    assert print_bytes(-amount_bytes) == (f"-{text}" if amount_bytes else text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1.5, "1.5 s"),
        (0.0123, "12.3 ms"),
        (4.5e-5, "45 us"),
        (2e-9, "2 ns"),
        (0.9996, "1 s"),
        (9.999e-4, "1 ms"),
        (59.9, "59.9 s"),
        (59.97, "1 min"),
        (61, "1 min 1 s"),
        (3599.6, "1 h"),
        (3725, "1 h 2 min"),
        (2 * 3600 - 1, "2 h"),
        (-0.5, "-500 ms"),
        (math.inf, "inf s"),
        (math.nan, "nan s"),
    ],
)
def test_known_durations_are_printed(seconds, text):
    assert print_seconds(seconds) == text


@given(st.floats(1e-9, 1e8))
def test_a_printed_duration_is_within_one_percent(seconds):
    # Three significant digits are off by at most half a percent, whole seconds
    # above a minute and whole minutes above an hour by less than one.
    assert printed_seconds(print_seconds(seconds)) == pytest.approx(seconds, rel=0.01)


@given(st.integers(1, 100))
def test_a_percentage_is_a_share(percent):
    assert parse_budget(f"{percent}%") == percent / 100
    assert parse_budget(f" {percent}.0 % ") == percent / 100


@given(st.integers(1, 10**4))
def test_a_share_is_equal_as_number_text_and_percentage(parts):
    share = parts / 10**4
    assert parse_budget(share) == share
    assert parse_budget(f"{share:.4f}") == share
    assert parse_budget(f"{100 * share:.2f}%") == pytest.approx(share)


@given(st.integers(1, 2**50))
def test_bytes_are_equal_as_number_and_as_text(amount_bytes):
    found = [parse_budget(given) for given in (amount_bytes, str(amount_bytes))]
    assert found == [amount_bytes, amount_bytes]
    assert all(isinstance(each, int) for each in found)
    if amount_bytes >= 1000:  # as in budget=0.9 * total, or 8e9
        assert parse_budget(float(amount_bytes)) == amount_bytes
        assert parse_budget(amount_bytes + 0.5) == amount_bytes
        assert parse_budget(f"{amount_bytes}.5") == amount_bytes


@pytest.mark.parametrize(
    "budget",
    [
        *("0%", "-5%", "100.1%", "nan%", "inf%", "%", "x%", "60%%", "60% or so"),
        *("1.5", 1.5, 999.0, "999.0", -0.5, 0.0, "0.0", 0, "0", "0 GiB", -1),
        *(float("nan"), float("inf"), True, None, "", "abc", [1], b"1"),
    ],
)
def test_invalid_budgets_are_refused_and_named(budget):
    with pytest.raises(UsageError, match=re.escape(repr(budget))):
        parse_budget(budget)


@given(st.text(max_size=12))
def test_any_text_is_a_positive_budget_or_refused_with_our_error(text):
    try:
        found = parse_budget(text)
    except UsageError:
        return
    assert found > 0
    assert isinstance(found, int) or found <= 1

"""The floor: what one process is told, another one reaches."""

import pytest

from benchmarks.zoo.cases import CASES
from tests.support.fitting import outcome_of
from tests.support.floors import floor_of, floors_elsewhere

NAMES = ["u-net", "lstm"]
"""A slice; tests/sweep/test_fit.py has them all."""


@pytest.fixture(scope="module")
def elsewhere() -> dict[str, tuple[int, str]]:
    return floors_elsewhere(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_find_the_same_floor_and_the_same_plan_there(name, elsewhere):
    assert floor_of(name) == elsewhere[name]


@pytest.mark.parametrize("name", NAMES)
def test_the_floor_that_another_process_told_is_reached(name, elsewhere):
    found = outcome_of(CASES[name], elsewhere[name][0])
    assert found.fits
    assert found.peak_bytes <= found.budget_bytes
    assert found.differences == ()
    assert found.left_behind == ()


def test_below_the_floor_the_error_names_a_budget_that_is_met(elsewhere):
    refused = outcome_of(CASES["lstm"], elsewhere["lstm"][0] // 2)
    assert not refused.fits
    assert refused.floor_bytes <= elsewhere["lstm"][0]
    assert outcome_of(CASES["lstm"], refused.floor_bytes).fits

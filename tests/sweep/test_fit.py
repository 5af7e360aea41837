"""Every model of the zoo at every budget."""

import pytest
import torch

from benchmarks.zoo.cases import CASES
from tests.support.fitting import cell, outcome_of
from tests.support.floors import floor_of, floors_elsewhere

pytestmark = pytest.mark.sweep

PEAK_TOLERANCE = 0.03
SHARES = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3, "floor")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", CASES)
def test_what_fits_is_within_the_budget_predicted_and_equal(name, share, dtype):
    found = cell(CASES[name], share, dtype=dtype)
    assert found.left_behind == ()
    if not found.fits:
        assert share != "floor", "the floor is the smallest budget that can be met"
        assert found.floor_bytes > found.budget_bytes
        return
    assert found.peak_bytes <= found.budget_bytes
    assert found.reported_peak_bytes == found.peak_bytes
    error_bytes = abs(found.predicted_peak_bytes - found.peak_bytes)
    assert error_bytes <= PEAK_TOLERANCE * found.peak_bytes
    assert found.differences == ()


@pytest.fixture(scope="module")
def elsewhere():
    return floors_elsewhere(list(CASES))


@pytest.mark.parametrize("name", CASES)
def test_the_floor_that_another_process_told_is_reached(name, elsewhere):
    assert floor_of(name) == elsewhere[name]
    floor_bytes, _ = elsewhere[name]
    found = outcome_of(CASES[name], floor_bytes)
    assert found.fits
    assert found.peak_bytes <= floor_bytes

"""Gradients are compared bit by bit, wherever they are, in chunks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recoup.measurement.steps import gradient_difference
from recoup.measurement.steps.gradient_difference import (
    difference_from,
    gradients_of,
    largest_difference,
)
from recoup.measurement.steps.training_step import training_step, untouched

NAN = float("nan")


@pytest.mark.parametrize(
    ("expected", "found", "difference"),
    [
        ([1.0, NAN], [1.0, NAN], 0.0),
        ([1.0, 1.0], [1.0, NAN], float("inf")),
        ([1.0, 2.0], [1.0, 2.5], 0.25),
        ([1.0], [1.0, 1.0], float("inf")),
        ([1.0], None, float("inf")),
        (None, [1.0], float("inf")),
        (None, None, 0.0),
        ([], [], 0.0),
    ],
)
def test_differences_are_relative_to_the_largest_entry(expected, found, difference):
    one, other = (None if x is None else torch.tensor(x) for x in (expected, found))
    assert largest_difference([one], [other]) == difference


def test_zeros_of_both_signs_differ():
    zero = torch.zeros(2)
    assert 0 < largest_difference([zero], [-zero]) < 1e-30


def test_gradients_that_are_zero_but_for_rounding_are_compared_with_the_largest():
    large, small = torch.tensor([1000.0]), torch.tensor([1e-9])
    found = largest_difference([large, small], [large, 2 * small])
    assert found == pytest.approx(1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_one_bit_is_seen_in_every_format(dtype):
    one = torch.ones(5, dtype=dtype)
    other = one.clone()
    other[3] += torch.finfo(dtype).eps
    assert largest_difference([one], [one.clone()]) == 0.0
    assert largest_difference([one], [other]) == torch.finfo(dtype).eps


def test_layout_does_not_count():
    one = torch.randn(2, 3, 4, 5)
    other = one.to(memory_format=torch.channels_last)
    sparse = torch.eye(3).to_sparse()
    assert largest_difference([one, sparse], [other, torch.eye(3)]) == 0.0


@given(
    st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=40),
    st.data(),
)
def test_chunks_change_nothing(values, data):
    one = torch.tensor(values)
    change = data.draw(st.lists(st.sampled_from([0.0, 0.5]), min_size=len(values)))
    other = one + torch.tensor(change[: len(values)])
    whole = largest_difference([one], [other])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_difference, "_CHUNK_BYTES", 12)
        assert largest_difference([one], [other]) == whole


def test_another_run_of_a_step_is_compared_with_a_copy():
    head = nn.Linear(3, 1)
    model = nn.Sequential(nn.Linear(3, 3), head)
    with untouched(training_step(model, torch.randn(2, 3), loss=torch.sum)) as step:
        expected = gradients_of(step)
        assert difference_from(expected, step) == 0.0
        with torch.no_grad():
            head.weight.mul_(2)
        assert difference_from(expected, step) == pytest.approx(1.0)

"""Outcomes: the host says what it knows, and nothing that the device alone knows."""

import gc

import pytest
import torch

from recoup.errors import UsageError
from recoup.precision.outcomes import Outcomes


def optimizers(count):
    return [torch.optim.SGD([torch.ones(1)]) for _ in range(count)]


@pytest.mark.parametrize(
    ("skipped", "checked", "overflowed"),
    [
        ([], 0, None),
        ([False], 1, False),
        ([True], 1, True),
        ([False, True], 2, True),
        ([False, False], 2, False),
        ([False], 2, None),
        ([torch.tensor(True)], 1, None),
        ([False, torch.tensor(False)], 2, None),
        ([torch.tensor(False), True], 2, True),
    ],
)
def test_an_iteration_overflowed_if_one_step_was_skipped(skipped, checked, overflowed):
    outcomes = Outcomes()
    steps = optimizers(len(skipped))
    for optimizer, was_skipped in zip(steps, skipped, strict=True):
        outcomes.add(optimizer, skipped=was_skipped)
    assert outcomes.overflowed(checked) is overflowed


def test_an_iteration_that_is_over_can_be_asked_about_until_the_next_begins():
    (optimizer,) = optimizers(1)
    outcomes = Outcomes()
    outcomes.add(optimizer, skipped=True)
    outcomes.end_iteration()
    assert outcomes.last(optimizer)[0].was_skipped()
    assert outcomes.overflowed(1) is None
    outcomes.begin_step()
    assert optimizer not in outcomes
    with pytest.raises(UsageError, match="has taken none of that optimizer"):
        outcomes.last(optimizer)


def test_within_an_iteration_a_step_leaves_those_of_others():
    first, second = optimizers(2)
    outcomes = Outcomes()
    outcomes.add(first, skipped=False)
    outcomes.begin_step()
    outcomes.discard(second)
    assert first in outcomes


def test_one_at_the_address_of_an_optimizer_that_is_gone_is_another():
    (optimizer,) = optimizers(1)
    outcomes = Outcomes()
    outcomes.add(optimizer, skipped=True)
    del optimizer
    gc.collect()
    with pytest.raises(UsageError, match="has taken none of that optimizer"):
        outcomes.last(optimizers(1)[0])
    assert len(outcomes.last(None)) == 1

"""Outcomes: known on the host, or only on the device."""

import gc

import pytest
import torch

from recoup.errors import UsageError
from recoup.precision.scaler import Outcomes


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


def test_the_outcome_of_an_iteration_is_available_until_the_next_begins():
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


def test_a_step_keeps_the_outcomes_of_other_optimizers_in_an_iteration():
    first, second = optimizers(2)
    outcomes = Outcomes()
    outcomes.add(first, skipped=False)
    outcomes.begin_step()
    outcomes.discard(second)
    assert first in outcomes


def test_an_optimizer_at_a_reused_address_is_another_one():
    (optimizer,) = optimizers(1)
    outcomes = Outcomes()
    outcomes.add(optimizer, skipped=True)
    del optimizer
    gc.collect()
    with pytest.raises(UsageError, match="has taken none of that optimizer"):
        outcomes.last(optimizers(1)[0])
    assert len(outcomes.last(None)) == 1

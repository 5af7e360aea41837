"""Levels of recomputation for units: the lowest that fits, by real steps."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from recoup.checkpointing import is_checkpointed
from recoup.errors import InfeasibleError
from recoup.measurement.steps.floor import run_step
from recoup.measurement.steps.training_step import training_step
from recoup.train.budgeting.process_budget import UnitPlan, lowest_level, units_of


@given(
    growths=st.lists(st.integers(0, 50), max_size=60),
    share=st.floats(0.0, 1.0),
)
def test_the_level_is_the_lowest_that_fits(growths, share):
    peaks = [100]
    for growth in growths:
        peaks.insert(0, peaks[0] + growth)
    budget = int(100 + share * (peaks[0] - 100))
    asked = []

    def peak_at(level):
        asked.append(level)
        return peaks[level]

    level, peak = lowest_level(peak_at, len(growths), budget)
    assert peak == peaks[level] <= budget
    assert level == 0 or peaks[level - 1] > budget
    assert len(asked) == len(set(asked))


def test_only_a_few_levels_are_tried():
    asked = []

    def peak_at(level):
        asked.append(level)
        return 1000 - level

    assert lowest_level(peak_at, 200, 900) == (100, 900)
    assert len(asked) <= 2 * math.log2(200) + 1


def test_peaks_far_above_the_budget_are_not_tried():
    asked = []

    def peak_at(level):
        asked.append(1000 - 10 * level)
        return asked[-1]

    lowest_level(peak_at, 90, 500)
    assert max(asked) <= 510


def test_a_budget_below_the_floor_is_refused_with_the_floor():
    with pytest.raises(InfeasibleError, match="every unit recomputed") as caught:
        lowest_level(lambda _: 70, 4, 69)
    assert (caught.value.budget_bytes, caught.value.floor_bytes) == (69, 70)


def problem():
    torch.manual_seed(0)
    units = [
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.GELU(), nn.Linear(8, 8))
        for _ in range(4)
    ]
    model = nn.Sequential(*units)
    step = training_step(
        model, torch.ones(200, 8), loss=lambda out: out.square().mean()
    )

    def measure() -> int:
        run_step(step)
        return run_step(step).peak_bytes

    return units, model, measure


def test_every_budget_is_met_with_the_same_bits():
    units, model, measure = problem()
    plain = measure()
    model(torch.ones(200, 8)).square().mean().backward()
    expected = [p.grad for p in model.parameters()]
    lowest = UnitPlan(units)
    lowest.settle(plain, measure, 0)
    assert lowest.level == 0
    assert lowest.plan == ("keep",) * 4
    seen = set()
    for share in (0.9, 0.8, 0.7, 0.6, 0.5):
        plan = UnitPlan(units)
        budget = int(share * plain)
        try:
            plan.settle(budget, measure, 0)
        except InfeasibleError as error:
            assert error.floor_bytes > budget  # noqa: PT017 (whichever budget it is)
            continue
        seen.add(plan.plan)
        assert measure() <= budget
        model.zero_grad()
        model(torch.ones(200, 8)).square().mean().backward()
        assert all(
            torch.equal(one, p.grad)
            for one, p in zip(expected, model.parameters(), strict=True)
            if one is not None and p.grad is not None
        )
        chosen = plan.plan
        plan.remove()
        assert plan.plan == chosen, "the report of a training that has ended"
    assert len(seen) >= 2


def test_a_plan_that_is_refused_leaves_nothing_on_the_units():
    units, _, measure = problem()
    with pytest.raises(InfeasibleError):
        UnitPlan(units).settle(10, measure, 0)
    assert not any(is_checkpointed(unit) for unit in units)


def test_it_can_be_tightened_until_everything_is_recomputed():
    units, _, measure = problem()
    plan = UnitPlan(units)
    plan.settle(measure(), measure, 0)
    for level in range(1, 9):
        assert plan.tighten()
        assert plan.level == level
    assert plan.plan == ("recompute",) * 4
    assert not plan.tighten()
    assert "4 are recomputed" in str(plan)


def test_a_model_that_is_not_sharded_has_no_units():
    assert units_of(nn.Sequential(nn.Linear(2, 2))) == []

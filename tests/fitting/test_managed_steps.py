"""Kinds of steps that a manager knows: plans follow the measurements, as pure data."""

import pytest
import torch

from recoup import measure
from recoup.fitting.managing.managed_steps import CallKind, KnownStep, Limits
from tests.fitting.test_manager import X, network


@pytest.fixture(scope="module")
def graph():
    return measure(network(), X, loss=torch.sum)


def known(graph, **options):
    return KnownStep((CallKind(0, None, ((128, 32),)),), ("Net",), graph, 0, **options)


def between(graph, share):
    """Return a budget between the smallest peak and the plain one."""
    step = known(graph)
    step.replan(limits(1))
    smallest_bytes = step.planned_bytes
    return smallest_bytes + share * (step.plain_bytes - smallest_bytes)


def limits(budget_bytes, ratio=None):
    return Limits(
        is_on=True, budget_bytes=int(budget_bytes), max_ratio=ratio, options=""
    )


def test_a_plan_is_made_once_for_the_same_limits(graph):
    step = known(graph)
    wanted = limits(between(graph, 0.7))
    assert step.replan(wanted)
    assert not step.replan(wanted)
    assert step.planned_bytes <= wanted.budget_bytes


def test_a_step_that_took_more_than_planned_is_planned_for_less(graph):
    step = known(graph)
    wanted = limits(between(graph, 0.8))
    step.replan(wanted)
    spare_bytes = wanted.budget_bytes - step.planned_bytes
    step.checked(step.expected, wanted.budget_bytes + 10_000)
    assert step.replan(wanted)
    assert step.expected.target_bytes == wanted.budget_bytes - 10_000 - spare_bytes
    assert (step.expected.predicted_bytes or 0) <= wanted.budget_bytes - 10_000
    # The error is in the prediction from now on.
    assert (
        step.planned_bytes - (step.expected.predicted_bytes or 0)
        == 10_000 + spare_bytes
    )
    assert step.planned_bytes <= wanted.budget_bytes


def test_a_step_within_its_plan_keeps_it(graph):
    step = known(graph)
    wanted = limits(between(graph, 0.8))
    step.replan(wanted)
    step.checked(step.expected, step.planned_bytes)
    assert not step.needs_check
    assert not step.replan(wanted)


def test_a_budget_that_comes_back_gets_its_plan_back(graph):
    step = known(graph)
    small, large = limits(between(graph, 0.7)), limits(2 * step.plain_bytes)
    step.replan(small)
    first = step.expected
    step.checked(first, step.planned_bytes)
    assert step.replan(large)
    assert step.plan_of(0) is None
    assert step.replan(small)
    assert step.expected == first
    assert step.needs_check


def test_what_earlier_steps_left_is_planned_around_and_corrected_for(graph):
    step = known(graph)
    wanted = limits(between(graph, 0.9))
    step.replan(wanted)
    step.checked(step.expected, step.planned_bytes)
    step.left_bytes = 30_000
    assert step.replan(wanted)
    assert step.planned_bytes <= wanted.budget_bytes
    step.checked(step.expected, wanted.budget_bytes + 1)
    assert step.replan(wanted)
    assert step.planned_bytes <= wanted.budget_bytes


def test_a_step_that_nothing_fits_is_planned_once(graph):
    step = known(graph)
    wanted = limits(1)
    step.replan(wanted)
    smallest_bytes = step.planned_bytes
    step.checked(step.expected, smallest_bytes)
    assert not step.replan(wanted)
    assert step.planned_bytes == smallest_bytes > wanted.budget_bytes


def test_a_cap_on_recomputation_comes_before_the_budget(graph):
    step = known(graph)
    wanted = limits(between(graph, 0.6), ratio=0.1)
    step.replan(wanted)
    assert step.recompute_ratio <= 0.1
    assert step.planned_bytes > wanted.budget_bytes


@pytest.mark.parametrize(
    ("shapes", "is_covered"),
    [
        (((8, 4),), True),
        (((6, 4),), True),
        (((9, 4),), False),
        (((8,),), False),
        (((8, 4), (1,)), False),
    ],
)
def test_a_kind_of_call_covers_smaller_ones_of_the_same_rank(shapes, is_covered):
    kind = CallKind(0, None, ((8, 4),))
    assert kind.covers(CallKind(0, None, shapes)) == is_covered
    assert not kind.covers(CallKind(1, None, shapes))
    assert kind.elements == 32

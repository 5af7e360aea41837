"""Decisions of the closed loop, from plain data alone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recoup.fitting.decision import (
    Accept,
    Infeasible,
    Outcome,
    TimeLeft,
    Try,
    decide,
    is_much_faster,
    more_laps,
    plan_for_slower_host,
    settled_pace,
)
from recoup.measurement.timing.pace import Pace

BUDGET = 1000
AMPLE = TimeLeft(0.0, 1e6)
NONE = TimeLeft(1e6, 0.0)


def ran(target, predicted, measured, budget=BUDGET):
    return Outcome(budget, target, predicted, measured)


class TestTargets:
    def test_the_first_target_is_the_budget_less_a_margin(self):
        assert decide([], BUDGET, margin_bytes=7) == Try(BUDGET - 7)

    def test_without_a_plan_for_the_margin_the_whole_budget_is_tried(self):
        history = [Outcome(BUDGET, BUDGET - 7)]
        assert decide(history, BUDGET, margin_bytes=7) == Try(BUDGET)
        history.append(Outcome(BUDGET, BUDGET))
        assert decide(history, BUDGET, margin_bytes=7) == Try(None)

    def test_without_a_plan_for_the_budget_the_smallest_is_tried(self):
        assert decide([Outcome(BUDGET, BUDGET)], BUDGET) == Try(None)

    @pytest.mark.parametrize("has_time", [True, False])
    def test_a_plan_that_misses_is_corrected_by_its_error_whatever_the_time(
        self, has_time
    ):
        history = [ran(995, 990, 1040)]
        decision = decide(history, BUDGET, margin_bytes=5, has_time=has_time)
        assert decision == Try(BUDGET - 5 - 50)

    def test_of_several_errors_the_largest_counts(self):
        history = [ran(1000, 1000, 1060), ran(940, 930, 1001)]
        assert decide(history, BUDGET) == Try(BUDGET - 71)

    def test_errors_are_learned_from_steps_for_other_budgets(self):
        history = [ran(2000, 1900, 1950, budget=2000)]
        history.append(ran(3000, 2900, 2920, budget=3000))
        assert decide(history, BUDGET) == Try(BUDGET - 50)

    def test_without_a_plan_for_a_corrected_target_the_margin_is_given_up(self):
        history = [ran(993, 990, 1010), Outcome(BUDGET, 973)]
        assert decide(history, BUDGET, margin_bytes=7) == Try(980)
        history.append(Outcome(BUDGET, 980))
        assert decide(history, BUDGET, margin_bytes=7) == Try(None)

    def test_a_step_for_another_budget_is_not_accepted(self):
        fitted = ran(900, 900, 900, budget=900)
        assert decide([fitted], 900) == Accept(0)
        assert decide([fitted], BUDGET) == Try(BUDGET)

    def test_after_four_misses_the_smallest_is_tried(self):
        history = [ran(BUDGET - n, BUDGET - n, BUDGET + 1) for n in range(3)]
        assert decide(history, BUDGET) == Try(BUDGET - 3)
        history.append(ran(BUDGET - 3, BUDGET - 3, BUDGET + 1))
        assert decide(history, BUDGET) == Try(None)

    def test_a_plan_that_ran_before_is_not_run_again(self):
        history = [ran(1000, 900, 1010), Outcome(BUDGET, 890, 900)]
        assert decide(history, BUDGET) == Try(None)

    @pytest.mark.parametrize(("measured", "predicted"), [(1200, 1100), (1100, 1200)])
    def test_the_floor_is_the_larger_of_measured_and_predicted(
        self, measured, predicted
    ):
        history = [Outcome(BUDGET, BUDGET), ran(None, predicted, measured)]
        assert decide(history, BUDGET) == Infeasible(1200)


class TestRoom:
    def test_room_is_used_once_and_only_if_there_is_time(self):
        history = [ran(1000, 1000, 900)]
        assert decide(history, BUDGET) == Accept(0)
        assert decide(history, BUDGET, has_time=True) == Try(BUDGET + 100)
        history.append(ran(1100, 1090, 960))
        assert decide(history, BUDGET, has_time=True) == Accept(1)

    def test_a_plan_that_uses_the_room_and_misses_is_not_accepted(self):
        history = [ran(1000, 1000, 900), ran(1100, 1090, 1001)]
        assert decide(history, BUDGET, has_time=True) == Accept(0)

    def test_little_room_is_left(self):
        assert decide([ran(1000, 1000, 981)], BUDGET, has_time=True) == Accept(0)

    def test_room_that_was_predicted_is_left(self):
        assert decide([ran(1000, 500, 500)], BUDGET, has_time=True) == Accept(0)

    def test_the_smallest_plan_is_accepted_as_it_is(self):
        history = [Outcome(BUDGET, BUDGET), ran(None, 990, 600)]
        assert decide(history, BUDGET, has_time=True) == Accept(1)


@given(
    peaks=st.sets(st.integers(1, 2000), min_size=1, max_size=12),
    errors=st.lists(st.integers(-300, 300), min_size=12, max_size=12),
    margin=st.integers(0, 50),
    has_time=st.booleans(),
)
def test_any_step_ends_with_a_plan_that_fits_or_with_a_smallest_that_does_not(
    peaks, errors, margin, has_time
):
    """A world of plans: each has a predicted peak, and its step an error of its own."""
    plans = sorted(peaks)
    history: list[Outcome] = []
    for _ in range(9):
        decision = decide(history, BUDGET, margin_bytes=margin, has_time=has_time)
        if not isinstance(decision, Try):
            break
        target = decision.target_bytes
        fitting = plans[:1] if target is None else [p for p in plans if p <= target]
        predicted = fitting[-1] if fitting else None
        is_known = (
            target is not None
            and bool(history)
            and history[-1].measured_bytes is not None
            and history[-1].predicted_bytes == predicted
        )
        measured = None
        if predicted is not None and not is_known:
            measured = max(1, predicted + errors[plans.index(predicted)])
        history.append(Outcome(BUDGET, target, predicted, measured))
    else:
        pytest.fail(f"no decision after {history}")
    if isinstance(decision, Accept):
        assert history[decision.number].fits
    else:
        assert isinstance(decision, Infeasible)
        assert not any(outcome.fits for outcome in history)
        assert history[-1].target_bytes is None
        assert decision.needed_bytes > BUDGET
    # A target is lowered by every miss: no plan is tried twice for the same.
    targets = [outcome.target_bytes for outcome in history]
    assert len(set(targets)) == len(targets)


class TestTime:
    def test_optional_work_ends_four_seconds_and_twelve_steps_after_the_start(self):
        assert TimeLeft(3.0, 0.5).allows(6.9)
        assert not TimeLeft(3.0, 0.5).allows(7.0)
        assert TimeLeft(1.0, 0.5).patience_seconds == 5.0

    def test_an_attempt_takes_longer_if_it_is_timed(self):
        left = TimeLeft(0.0, 0.0)
        assert left.allows_attempt(1.0)
        assert not left.allows_attempt(1.0, timed=True)


class TestPaces:
    def test_a_predicted_pace_is_believed(self):
        assert more_laps(Pace(1.04, 0.1), 1.0, AMPLE) == 0

    def test_a_surprising_pace_is_measured_again_if_there_is_time(self):
        assert more_laps(Pace(3.0, 0.1), 1.0, AMPLE) == 3
        assert more_laps(Pace(3.0, 0.1), 1.0, NONE) == 0

    @pytest.mark.parametrize(("seconds", "laps"), [(0.1, 7), (0.2, 5), (0.6, 3)])
    def test_a_cpu_bound_pace_is_measured_by_more_laps_if_they_are_short(
        self, seconds, laps
    ):
        assert more_laps(Pace(seconds, seconds), seconds, AMPLE) == laps

    def test_where_many_laps_take_too_long_a_few_are_measured(self):
        assert more_laps(Pace(0.1, 0.1), 0.1, TimeLeft(3.5, 0.0)) == 3

    def test_a_step_takes_no_longer_in_a_row_than_alone(self):
        assert settled_pace(Pace(1e3, 1e-6), None, 0.25) == Pace(0.25, 1e-6)
        assert settled_pace(Pace(1e3, 1.0), None, 0.25) == Pace(0.25, 0.25)

    def test_the_second_measurement_counts(self):
        first, again = Pace(3.0, 0.1), Pace(1.0, 0.1)
        assert settled_pace(first, again, 9.0) == again

    def test_many_cpu_bound_laps_say_more_than_one_step_alone(self):
        again = Pace(0.2, 0.2)
        assert settled_pace(Pace(0.3, 0.3), again, 0.1) == again


class TestASlowerHost:
    PACE = Pace(2.0, 2.0)

    def test_it_is_planned_for_if_there_is_time(self):
        assert plan_for_slower_host(self.PACE, 1.0, AMPLE)
        assert not plan_for_slower_host(self.PACE, 1.0, NONE)

    def test_not_where_the_prediction_was_right_or_the_device_is_slower(self):
        assert not plan_for_slower_host(self.PACE, 1.95, AMPLE)
        slow_device = replace(self.PACE, seconds=4.0)
        assert not plan_for_slower_host(slow_device, 1.0, AMPLE)

    def test_another_plan_is_tried_if_it_is_predicted_to_be_faster(self):
        assert is_much_faster(1.9, self.PACE)
        assert not is_much_faster(1.95, self.PACE)

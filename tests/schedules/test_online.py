"""Online: right for every length, without knowing it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recoup.schedules import Online, Revolve, interpret
from recoup.schedules.schedule import Snapshot


@given(st.integers(1, 300), st.integers(1, 30))
def test_an_online_schedule_is_valid_and_has_the_stated_cost(steps, slots):
    schedule = Online(slots)
    counted = interpret(schedule.actions(steps), steps)
    assert counted == schedule.counts(steps)
    assert counted.peak_slots <= slots


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 20))
def test_snapshots_do_not_depend_on_the_future_length(first, second, slots):
    def kept(steps):
        placement = Online(slots).begin()
        return [list(placement.reach(step)) for step in range(steps)]

    shorter = min(first, second)
    assert kept(first)[:shorter] == kept(second)[:shorter]


@pytest.mark.parametrize(
    ("steps", "slots", "evaluations"),
    [
        (100, 2, 1250),
        (100, 10, 338),
        (1000, 3, 16516),
        (1000, 5, 9350),
        (1000, 10, 5156),
        (1000, 31, 3592),
        (1000, 100, 2937),
    ],
)
def test_the_counts_of_interval_doubling(steps, slots, evaluations):
    found = Online(slots).counts(steps).evaluations
    assert found == evaluations
    assert found >= Revolve(steps, slots=slots).counts().evaluations


def test_a_loop_that_never_runs_keeps_nothing():
    assert list(Online(3).actions(0)) == []
    assert Online(3).counts(0).evaluations == 0


def test_the_initial_state_is_always_held():
    placement = Online(2).begin()
    assert list(placement.reach(0)) == [Snapshot(0, 0)]
    for step in range(1, 1000):
        list(placement.reach(step))
        assert placement.positions[0] == 0
        assert len(placement.positions) <= 2

"""The interpreter accepts valid schedules and names faults."""

import pytest

from recoup.errors import ScheduleError
from recoup.schedules import Revolve, interpret
from recoup.schedules.schedule import Advance, Free, Restore, Reverse, Snapshot

GOOD = [
    Snapshot(0, 0),
    Advance(0, 2),
    Reverse(2, 3),
    Restore(0, 0),
    Advance(0, 1),
    Reverse(1, 2),
    Restore(0, 0),
    Reverse(0, 1),
    Free(0),
]


def without(*places):
    return [action for place, action in enumerate(GOOD) if place not in places]


def changed(place, action):
    return [*GOOD[:place], action, *GOOD[place + 1 :]]


def test_a_valid_schedule_is_counted():
    counts = interpret(GOOD, 3)
    assert (counts.advances, counts.taped) == (3, 3)
    assert (counts.peak_slots, counts.peak_tape) == (1, 1)
    assert counts.evaluations == 6
    assert counts.extra_evaluations == 3


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (without(3), "the current state is None"),
        (without(4), "the current state is 0"),
        (without(0), "the slot holds None"),
        (without(8), r"ends with slots \[0\] in use"),
        (without(6, 7), "reverses every step, got one that ends before step 0"),
        (changed(2, Reverse(2, 2)), "the end is at 3"),
        (changed(5, Reverse(1, 3)), "the end is at 2"),
        (changed(5, Reverse(0, 2)), "the current state is 1"),
        (changed(1, Advance(0, 4)), "no such steps"),
        (changed(1, Advance(2, 1)), "no such steps"),
        (changed(4, Snapshot(0, 0)), "the slot is in use"),
        (changed(4, Snapshot(1, 1)), "the current state is 0"),
        (changed(6, Restore(1, 0)), "the slot holds 0"),
        (changed(8, Free(1)), "the slot is empty"),
        ([*GOOD, Free(0)], "the slot is empty"),
    ],
)
def test_an_invalid_schedule_is_reported(actions, message):
    with pytest.raises(ScheduleError, match=message):
        interpret(actions, 3)


def test_a_schedule_for_another_length_is_refused():
    with pytest.raises(ScheduleError):
        interpret(Revolve(10, slots=3).actions(), 11)
    with pytest.raises(ScheduleError):
        interpret(Revolve(10, slots=3).actions(), 9)

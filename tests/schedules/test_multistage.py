"""Multistage: Revolve's evaluations, the busiest slots in the fastest tier."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recoup.errors import UsageError
from recoup.schedules import Chunked, Multistage, Revolve, interpret
from recoup.schedules.schedule import Snapshot


@given(st.integers(1, 200), st.lists(st.integers(0, 6), min_size=1), st.integers(1, 5))
def test_a_multistage_schedule_is_a_chunked_one_with_tiers(steps, tier_slots, chunk):
    if sum(tier_slots) == 0:
        tier_slots[0] = 1
    schedule = Multistage(steps, tuple(tier_slots), chunk)
    assert interpret(schedule.actions(), steps) == schedule.counts()
    plain = Chunked(steps, slots=sum(tier_slots), chunk=chunk)
    assert schedule.counts() == plain.counts()
    for tier, slots in enumerate(tier_slots):
        assert schedule.tiers().count(tier) == slots


def test_a_faster_tier_is_used_at_least_as_much_per_slot():
    schedule = Multistage(1000, (3, 4, 5))
    fast, middle, slow = schedule.transfers()
    assert fast / 3 >= middle / 4 >= slow / 5
    writes = [a for a in Revolve(1000, slots=12).actions() if isinstance(a, Snapshot)]
    assert fast + middle + slow > len(writes)


def test_no_other_assignment_moves_less_to_the_slow_tier():
    schedule = Multistage(60, (2, 2))
    slow = schedule.transfers()[1]
    uses = schedule._uses()
    pairs = [uses[a] + uses[b] for a in range(4) for b in range(a)]
    assert slow == min(pairs)


def test_impossible_tiers_are_refused():
    with pytest.raises(UsageError, match="slots of at least 1"):
        Multistage(10, (0, 0))
    with pytest.raises(UsageError, match="0 or more slots"):
        Multistage(10, (3, -1))

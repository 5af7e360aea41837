"""Even: the positions of the original guide, one segment on the tape at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recoup.errors import UsageError
from recoup.schedules import Even, StoreAll, interpret, positions
from recoup.schedules.even import compute_checkpoint_positions


def test_the_example_of_the_guide():
    found = compute_checkpoint_positions(1000, 31)
    assert found[:4] == [31, 62, 93, 124]
    assert found[-7:] == [776, 808, 840, 872, 904, 936, 968]


@pytest.mark.parametrize(
    ("steps", "checkpoints", "expected"),
    [
        (100, 5, [16, 32, 49, 66, 83]),
        (10, 3, [2, 4, 7]),
        (5, 10, [0, 1, 2, 3, 4]),
        (100, 0, []),
        (100, 1, [50]),
        (0, 3, []),
        (1, 1, [0]),
    ],
)
def test_the_positions_of_the_original_guide(steps, checkpoints, expected):
    assert compute_checkpoint_positions(steps, checkpoints) == expected


@given(st.integers(0, 400), st.integers(0, 420))
def test_positions_are_sorted_unique_inside_and_of_the_requested_number(
    steps, checkpoints
):
    found = compute_checkpoint_positions(steps, checkpoints)
    assert found == sorted(set(found))
    assert all(0 <= position < steps for position in found)
    assert len(found) == min(steps, checkpoints)


@given(st.integers(1, 300), st.integers(0, 320))
def test_an_even_schedule_is_valid_and_has_the_stated_cost(steps, checkpoints):
    schedule = Even(steps, checkpoints)
    assert interpret(schedule.actions(), steps) == schedule.counts()
    kept = set(compute_checkpoint_positions(steps, checkpoints))
    assert set(positions(schedule)) == kept - {0}


@pytest.mark.parametrize(
    ("steps", "checkpoints", "peak"),
    [(1000, 31, 64), (100, 10, 21), (500, 22, 45), (5000, 70, 142), (1000, 10, 102)],
)
def test_fewer_checkpoints_than_the_root_need_more_memory(steps, checkpoints, peak):
    assert Even(steps, checkpoints).counts().peak_states == peak


def test_a_loop_without_steps_costs_nothing():
    for schedule in (Even(0, 3), StoreAll(0)):
        assert list(schedule.actions()) == []
        assert interpret(schedule.actions(), 0) == schedule.counts()


def test_negative_amounts_are_refused():
    with pytest.raises(UsageError, match="expected 0 or more"):
        compute_checkpoint_positions(-1, 3)
    with pytest.raises(UsageError, match="expected 0 or more"):
        compute_checkpoint_positions(3, -1)

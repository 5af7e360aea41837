"""Revolve: the fewest possible evaluations, never more states than slots."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recoup.errors import UsageError
from recoup.schedules import Chunked, Even, Revolve, StoreAll, interpret, positions

SLOTS = (1, 2, 3, 5, 10, 31, 100)
# Griewank and Walther's optimum: evaluations, taped ones included, by steps and slots.
OPTIMUM = {
    10: (55, 30, 25, 23, 19, 19, 19),
    50: (1275, 335, 230, 172, 138, 117, 99),
    100: (5050, 945, 590, 416, 322, 267, 199),
    1000: (500500, 29820, 13155, 7284, 4636, 3439, 2898),
    10000: (50005000, 942820, 288730, 122868, 67624, 43455, 34747),
}
CELLS = [
    (steps, slots, evaluations)
    for steps, row in OPTIMUM.items()
    for slots, evaluations in zip(SLOTS, row, strict=True)
]


@cache
def fewest_by_search(steps, slots):
    """Return the optimum by the recurrence: try every first snapshot."""
    if steps == 1:
        return 0
    if slots == 1:
        return steps * (steps - 1) // 2
    return min(
        cut + fewest_by_search(cut, slots) + fewest_by_search(steps - cut, slots - 1)
        for cut in range(1, steps)
    )


@pytest.mark.parametrize(("steps", "slots", "evaluations"), CELLS)
def test_the_formula_gives_the_oracle_table(steps, slots, evaluations):
    assert Revolve(steps, slots=slots).counts().evaluations == evaluations


@pytest.mark.parametrize(
    ("steps", "slots", "evaluations"), [cell for cell in CELLS if cell[2] < 10**6]
)
def test_the_actions_have_the_evaluations_of_the_table(steps, slots, evaluations):
    counted = interpret(Revolve(steps, slots=slots).actions(), steps)
    assert counted.evaluations == evaluations
    assert counted.peak_slots <= slots


def count_of_checkpoint_schedules(steps, slots):
    """Return the evaluations of another implementation (untaped and taped)."""
    checkpoint_schedules = pytest.importorskip(
        "checkpoint_schedules", reason="a machine without a network may lack it"
    )
    evaluations = 0
    for action in checkpoint_schedules.MultistageCheckpointSchedule(steps, slots, 0):
        if isinstance(action, checkpoint_schedules.Forward):
            evaluations += action.n1 - action.n0
        if isinstance(action, checkpoint_schedules.EndReverse):
            break
    return evaluations


@pytest.mark.parametrize(
    ("steps", "slots", "evaluations"), [cell for cell in CELLS if cell[2] < 50_000]
)
def test_checkpoint_schedules_has_the_same_evaluations(steps, slots, evaluations):
    assert count_of_checkpoint_schedules(steps, slots) == evaluations


def test_no_schedule_found_by_search_is_better():
    for steps in range(1, 101):
        for slots in range(1, 11):
            schedule = Revolve(steps, slots=slots)
            assert schedule.counts().advances == fewest_by_search(steps, slots)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 30))
def test_a_chunked_schedule_is_valid_and_has_the_stated_cost(steps, slots, chunk):
    schedule = Chunked(steps, slots=slots, chunk=chunk)
    counted = interpret(schedule.actions(), steps)
    assert counted == schedule.counts()
    assert counted.peak_slots <= slots
    assert counted.peak_tape <= chunk


@given(st.integers(1, 500), st.integers(1, 60))
def test_a_revolve_schedule_is_valid_and_has_the_stated_cost(steps, slots):
    schedule = Revolve(steps, slots=slots)
    assert interpret(schedule.actions(), steps) == schedule.counts()
    assert schedule.counts().peak_slots <= slots
    assert schedule.counts().peak_tape == 1


@given(st.integers(1, 300), st.integers(1, 30))
def test_one_chunk_for_all_is_plain_backpropagation(steps, slots):
    chunked = Chunked(steps, slots=slots, chunk=steps).counts()
    plain = StoreAll(steps).counts()
    assert (chunked.evaluations, chunked.peak_tape) == (plain.evaluations, steps)


def test_equal_chunks_with_enough_slots_are_the_even_segments():
    chunked = Chunked(1000, slots=9, chunk=100)
    even = Even(1000, 9)
    assert chunked.counts().evaluations == even.counts().evaluations == 1900


@pytest.mark.parametrize(
    ("steps", "slots", "expected"),
    [
        (10, 3, [4, 7]),
        (100, 5, [56, 80, 90, 96]),
        (1000, 10, [286, 506, 671, 791, 875, 931, 966, 986, 996]),
    ],
)
def test_the_first_sweep_keeps_the_binomial_positions(steps, slots, expected):
    assert positions(Revolve(steps, slots=slots)) == expected


def test_a_million_steps_need_no_table_and_no_recursion():
    schedule = Revolve(10**6, slots=20)
    for count, _ in enumerate(schedule.actions()):
        if count == 10_000:
            break
    # C(20 + 8, 8) exceeds a million: no step is advanced more than 8 times.
    assert 6 < schedule.counts().extra_per_step < 8


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Revolve(-1, slots=1),
        lambda: Revolve(1, slots=0),
        lambda: Chunked(1, slots=1, chunk=0),
        lambda: Even(1, -1),
        lambda: StoreAll(-1),
    ],
)
def test_impossible_amounts_are_refused(wrong):
    with pytest.raises(UsageError, match="of at least"):
        wrong()


@pytest.mark.parametrize(
    "schedule", [Revolve(0, slots=1), Chunked(0, slots=2, chunk=3), StoreAll(0)]
)
def test_a_loop_without_steps_has_no_actions(schedule):
    assert list(schedule.actions()) == []
    assert interpret(schedule.actions(), 0) == schedule.counts()

"""A byte budget: never exceeded, and close to the exact optimum."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recoup.errors import UsageError
from recoup.schedules import Chunked, Revolve, fit_budget, least_evaluations

sizes = st.integers(1, 60)


@given(st.integers(1, 80), st.integers(0, 400), sizes, sizes)
def test_the_schedule_fits_and_no_chunk_is_better(steps, extra, state, tape):
    budget = tape + extra
    found = fit_budget(steps, budget, state_bytes=state, tape_bytes=tape)
    counts = found.counts()
    assert (found.slots - 1) * state + found.chunk * tape <= budget
    for chunk in range(1, min(steps, budget // tape) + 1):
        slots = 1 + (budget - chunk * tape) // state
        other = Chunked(steps, slots=slots, chunk=chunk)
        assert counts.evaluations <= other.counts().evaluations


@pytest.mark.parametrize(
    ("steps", "budget", "tape", "optimum", "chosen"),
    [
        (100, 24, 3, 206, 240),
        pytest.param(200, 48, 1, 352, 355, marks=pytest.mark.slow),
    ],
)
def test_the_gap_to_the_exact_optimum(steps, budget, tape, optimum, chosen):
    assert least_evaluations(steps, budget, tape=tape) == optimum
    found = fit_budget(steps, budget, state_bytes=1, tape_bytes=tape)
    assert found.counts().evaluations == chosen


@given(st.integers(1, 24), st.integers(1, 12), st.integers(1, 4))
def test_the_exact_optimum_is_never_worse(steps, extra, tape):
    budget = tape + extra
    exact = least_evaluations(steps, budget, tape=tape)
    found = fit_budget(steps, budget, state_bytes=1, tape_bytes=tape)
    assert exact is not None
    assert steps <= exact <= found.counts().evaluations


@pytest.mark.parametrize(("steps", "memory"), [(10, 1), (10, 3), (12, 12), (30, 4)])
def test_with_a_tape_that_holds_only_one_step_the_optimum_is_revolve(steps, memory):
    # A budget of the tape and `memory - 1` states, the tape too large for two.
    tape = 50
    exact = least_evaluations(steps, tape + memory - 1, tape=tape)
    assert exact == Revolve(steps, slots=memory).counts().evaluations


def test_a_budget_below_one_tape_is_refused():
    with pytest.raises(UsageError, match="does not hold the tape of one step"):
        fit_budget(10, 99, state_bytes=1, tape_bytes=100)
    assert least_evaluations(10, 99, tape=100) is None


def test_a_large_budget_gives_plain_backpropagation():
    found = fit_budget(1000, 10**9, state_bytes=8, tape_bytes=24)
    assert found.counts().evaluations == 1000


def test_a_long_loop_tries_few_chunks_and_finds_nearly_the_best(monkeypatch):
    arguments = {"state_bytes": 1, "tape_bytes": 3}
    few = fit_budget(1500, 90, **arguments).counts().evaluations
    monkeypatch.setattr("recoup.schedules.slot_budget._FEW", 1500)
    assert few == fit_budget(1500, 90, **arguments).counts().evaluations
    assert fit_budget(10**6, 3000, **arguments).chunk > 1

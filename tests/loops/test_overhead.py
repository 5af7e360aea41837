"""The overhead of a loop besides the evaluations of its schedule, by exact counts."""

import sys
from collections import Counter

import pytest

from recoup.schedules import Chunked, Revolve
from recoup.schedules.schedule import Reverse, Snapshot
from tests.support.counting import Operators
from tests.support.loops import Recurrence, checkpointed, plain_loop

NODES_OF_A_STEP = 5  # of `Recurrence.step`: two products, a sum, two tanh
MOST_FUNCTIONS = 90  # for a tape with the three or four actions around it
MOST_BUILTIN = 105


def calls_of(schedule):
    """The calls of Python functions, and of built-in ones, by name."""
    recurrence, loop = Recurrence(), checkpointed(schedule=schedule)
    recurrence.gradients(loop, schedule.steps)
    python, builtin = Counter(), Counter()

    def note(frame, event, called):
        if event == "call":
            python[frame.f_code.co_name] += 1
        elif event == "c_call":
            builtin[called.__name__] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        recurrence.gradients(loop, schedule.steps)
    finally:
        sys.setprofile(before)
    assert python["step"] == schedule.counts().evaluations
    return python, builtin


def operators_of(loop, steps):
    recurrence = Recurrence()
    with Operators() as operators:
        recurrence.gradients(loop, steps)
    return operators.counts


@pytest.mark.parametrize("slots", [1, 3, 20])
def test_a_longer_tape_adds_only_step_calls_and_node_visits(slots):
    short, long = (Chunked(10 * c, slots=slots, chunk=c) for c in (10, 20))
    (python, builtin), (more_python, more_builtin) = map(calls_of, (short, long))
    evaluations = long.counts().evaluations - short.counts().evaluations
    assert more_python - python == Counter(step=evaluations)
    assert python - more_python == Counter()
    more_builtin.subtract(builtin)
    assert more_builtin.pop("tanh") == 2 * evaluations
    further_steps = long.steps - short.steps
    assert more_builtin.pop("add") == NODES_OF_A_STEP * further_steps
    assert set(more_builtin.values()) == {0}


@pytest.mark.parametrize("chunk", [1, 10])
def test_an_additional_tape_costs_few_calls(chunk):
    few, many = (Chunked(chunk * t, slots=t, chunk=chunk) for t in (10, 20))
    (python, builtin), (more_python, more_builtin) = map(calls_of, (few, many))
    for counter in (python, more_python):
        del counter["step"]
    for counter in (builtin, more_builtin):
        del counter["tanh"], counter["add"]
    assert (more_python.total() - python.total()) / 10 <= MOST_FUNCTIONS
    assert (more_builtin.total() - builtin.total()) / 10 <= MOST_BUILTIN


@pytest.mark.parametrize(
    "schedule", [Revolve(30, slots=4), Chunked(30, slots=3, chunk=5)], ids=repr
)
def test_operators_equal_those_of_the_evaluations_and_the_plain_backward(schedule):
    again = schedule.counts().evaluations - schedule.steps
    expected = operators_of(plain_loop, schedule.steps)
    expected.update({"mm": 2 * again, "add": again, "tanh": 2 * again})
    found = operators_of(checkpointed(schedule=schedule), schedule.steps)
    assert expected - found == Counter()
    found.subtract(expected)
    kinds = Counter(map(type, schedule.actions()))
    # Without a graph: each tape's beginning, each state held and, for those of the
    # first sweep, what is remembered of it and compared.
    views = kinds[Reverse] + kinds[Snapshot] + 3 * schedule.slots
    assert found.pop("detach") <= views
    # The first step gets a copy, to see whether it writes to it.
    assert found.pop("clone") == 1
    assert found.pop("view") <= 3  # to ask the captured tensors for their nodes
    assert set(found.values()) == {0}

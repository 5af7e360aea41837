"""Steps interrupted at every line, and at every third instruction, of recoup's code.

And fits interrupted at every line, the first and the last time that it is reached.
`RECOUP_FILES` chooses files by a pattern. `--junitxml` counts the interrupts.
"""

import os

import pytest

from tests.support.interrupted_fits import interrupt_all
from tests.support.interrupted_steps import (
    STEPS,
    WRITE_PLACES,
    WRITES,
    CaughtStep,
    X,
    faults,
    gradients,
    model,
)
from tests.support.interrupts import interruptions

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.timeout(7200),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.parametrize("opcodes", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_an_interrupt_anywhere_leaves_nothing_behind(name, opcodes, record_property):
    net = model()
    expected = gradients(net, net(X))
    step = STEPS[name]()
    step()
    tried = 0
    for where in interruptions(step, opcodes=opcodes, every=3 if opcodes else 1):
        assert faults(step, expected) == [], where
        tried += 1
    record_property("interrupts", tried)


@pytest.mark.parametrize("place", WRITE_PLACES)
@pytest.mark.parametrize("name", WRITES)
def test_the_region_goes_on_with_what_an_interrupted_operator_wrote(
    name, place, record_property
):
    step = CaughtStep(WRITES[name], place)
    tried = 0
    for where in interruptions(step):
        assert step.is_right(), where
        tried += 1
    record_property("interrupts", tried)


def test_an_interrupt_at_any_line_of_fit_leaves_the_model_as_it_was(record_property):
    processes = os.cpu_count() or 1
    files = os.environ.get("RECOUP_FILES", "")
    tally = interrupt_all(processes, seconds=7000, files=files, report=print)
    record_property("interrupts", tally.kinds["whole"])
    assert tally.failures == {}
    # The times of operators decide the course of a fit: some lines are seldom reached.
    assert tally.kinds["not reached"] < 0.05 * tally.kinds["whole"]

"""Steps interrupted at every line, and at every third instruction, of recoup's code.

And fits interrupted at every line, the first and the last time that it is reached.
`RECOUP_FILES` chooses files by a pattern. `--junitxml` counts the interrupts.
"""

import os

import pytest

from tests.support.interrupted_fits import Fitting
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
from tests.support.interrupts import interruptions, interruptions_of_lines

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


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("budget", [0.8, 0.05], ids=["met", "infeasible"])
def test_an_interrupt_at_any_line_of_fit_leaves_the_model_as_it_was(
    budget, last, record_property
):
    fitting = Fitting(budget)
    files = os.environ.get("RECOUP_FILES", "")
    tried = 0
    for where in interruptions_of_lines(fitting, files=files, last=last):
        assert fitting.faults() == [], where
        tried += 1
        if tried % 40 == 0:
            fitting()
            assert fitting.faults() == [], f"a second fit after {where}"
    record_property("interrupts", tried)
    assert tried

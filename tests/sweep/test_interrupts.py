"""Steps interrupted at every line, and at every third instruction, of recoup's code."""

import pytest

from tests.support.interrupted_steps import STEPS, X, faults, gradients, model
from tests.support.interrupts import interruptions

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.parametrize("opcodes", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_an_interrupt_anywhere_leaves_nothing_behind(name, opcodes):
    net = model()
    expected = gradients(net, net(X))
    step = STEPS[name]()
    step()
    for where in interruptions(step, opcodes=opcodes, every=3 if opcodes else 1):
        assert faults(step, expected) == [], where

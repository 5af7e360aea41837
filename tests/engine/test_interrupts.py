"""After an interrupt anywhere in recoup's code the next step is as if nothing was."""

import contextlib
import sys
import weakref

import pytest

from recoup import CheckpointScope
from recoup.backend.operators.fingerprints import (
    fingerprint,
    fingerprints_within,
    is_fingerprinting,
)
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
from tests.support.interrupts import Interrupter, interruptions
from tests.support.work import OURS

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
EVERY = 61
"""A prime: over the steps every function gets its turn. The sweep takes every line."""


@pytest.mark.parametrize("name", STEPS)
def test_an_interrupt_at_a_line_leaves_nothing_behind(name):
    net = model()
    expected = gradients(net, net(X))
    step = STEPS[name]()
    step()
    for where in interruptions(step, every=EVERY):
        assert faults(step, expected) == [], where


OPENING = ("begin", "__enter__", "open", "close", "_leave", "__call__", "_end_entry")


def test_an_interrupt_at_an_instruction_of_opening_and_closing_leaves_nothing():
    net = model()
    expected = gradients(net, net(X))
    step = STEPS["scope"]()
    step()
    tried = 0
    while True:
        interrupter = Interrupter(7 * tried, opcodes=True, only=OPENING)
        if not interrupter.run(step):
            break
        tried += 1
        assert faults(step, expected) == [], interrupter.where
    assert tried > 20


WRITING = (
    *("_in_place", "_special", "_unrecorded", "_before_writes", "_after_write"),
    *("protect", "overwrite", "forget", "name_again", "name_results", "_born"),
)


@pytest.mark.parametrize("place", WRITE_PLACES)
@pytest.mark.parametrize("name", WRITES)
def test_the_region_goes_on_with_what_an_interrupted_operator_wrote(name, place):
    step = CaughtStep(WRITES[name], place)
    tried = 0
    for where in interruptions(step, only=WRITING):
        assert step.is_right(), where
        tried += 1
    assert tried > 20


def test_after_an_interrupted_fingerprint_operators_are_seen_again():
    tried = 0
    for where in interruptions(lambda: fingerprint(X), only=("fingerprint",)):
        assert not is_fingerprinting(), where
        tried += 1
    assert tried >= 3


def test_an_interrupted_limit_of_fingerprints_ends_with_its_block():
    asked: list[str] = []

    def limited() -> None:
        with fingerprints_within(lambda: asked.append("") or 0):
            fingerprint(X)

    tried = 0
    names = ("fingerprints_within", "__enter__", "__exit__", "fingerprint")
    for where in interruptions(limited, only=names):
        asked.clear()
        fingerprint(X)
        assert not asked, where
        tried += 1
    assert tried >= 6


def test_the_interrupter_interrupts_where_it_says():
    step = STEPS["scope"]()
    places = list(interruptions(step, every=400))
    assert len(places) > 3
    assert all(place.startswith(OURS) for place in places)


@pytest.mark.parametrize("opcodes", [False, True])
def test_the_interrupter_lets_no_handled_error_stay(opcodes):
    def scenario() -> None:
        for _ in range(2):
            with contextlib.suppress(ValueError), contextlib.ExitStack():
                raise ValueError
            try:
                raise ValueError
            except ValueError:
                pass

    tried = 0
    while True:
        interrupter = Interrupter(tried, opcodes=opcodes, within=__file__)
        if not interrupter.run(scenario):
            break
        assert sys.exc_info() == (None, None, None), interrupter.where
        tried += 1
    assert tried > 8


class Ended:
    """Runs a line when it dies."""

    def __del__(self) -> None:
        _ = 0


class Watched:
    """Can be referred to weakly."""


def test_an_interrupt_in_a_destructor_keeps_nothing_alive():
    seen: list[weakref.ref[Watched]] = []

    def scenario() -> None:
        watched = Watched()
        seen.append(weakref.ref(watched))
        ended = Ended()
        del ended

    interrupter = Interrupter(0, within=__file__, only=("__del__",))
    assert interrupter.run(scenario)
    assert interrupter.where.endswith("__del__")
    assert [each() for each in seen] == [None]


def test_the_faults_of_a_recorder_that_is_left_on_are_seen():
    net = model()
    expected = gradients(net, net(X))
    scope = CheckpointScope("left", verify="off")
    scope.__enter__()
    try:
        assert faults(STEPS["scope"](), expected)
    finally:
        scope.close()

"""Cleanup runs at whatever line an interrupt arrives, and runs once."""

import itertools
from collections import OrderedDict, deque
from typing import Any

import pytest

from recoup.core.restoring import refill, removing, restoring
from tests.support.interrupts import Interrupter, interruptions

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


class Handle:
    def __init__(self, hooks: set[object]) -> None:
        self._hooks = hooks
        hooks.add(self)

    def remove(self) -> None:
        self._hooks.discard(self)


def test_the_cleanup_runs_after_an_interrupt_at_any_instruction():
    state = ["clean"]

    def clean() -> None:
        state[:] = ["clean"]

    class Soiling(restoring):
        def __enter__(self) -> None:
            super().__enter__()
            state[:] = ["soiled"]

    def scenario() -> None:
        with Soiling(clean):
            assert state == ["soiled"]

    for opcodes in (False, True):
        places = 0
        for where in interruptions(scenario, opcodes=opcodes):
            assert state == ["clean"], where
            places += 1
        assert places > 5


def test_skipped_inner_cleanups_run_before_the_outer_one():
    order: list[str] = []
    kept: list[BaseException] = []

    def scenario() -> None:
        order.clear()
        with (
            restoring(lambda: order.append("outer")),
            restoring(lambda: order.append("inner")),
        ):
            pass

    at = 0
    for at in itertools.count():
        interrupter = Interrupter(at, only=("__enter__", "__exit__", "finish"))

        def remembered() -> None:
            try:
                scenario()
            except KeyboardInterrupt as error:
                kept.append(error)  # its traceback keeps all frames alive
                raise

        if not interrupter.run(remembered):
            break
        kept.clear()
        assert order in ([], ["outer"]) or order[-1] == "outer", interrupter.where
        assert order == sorted(order), interrupter.where
    assert at > 10


def test_an_interrupt_at_any_line_removes_all_handles():
    hooks: set[object] = set()

    def scenario() -> None:
        with removing() as handles:
            for _ in range(3):
                handles.append(Handle(hooks))
            assert len(hooks) == 3

    for where in interruptions(scenario):
        assert not hooks, where


def test_it_restores_once_and_raises_errors_of_restore():
    calls: list[int] = []
    with restoring(lambda: calls.append(1)):
        assert not calls
    assert calls == [1]
    with pytest.raises(ZeroDivisionError), restoring(lambda: calls.append(1 // 0)):
        pass
    assert calls == [1]


def test_without_enter_nothing_is_restored():
    calls: list[int] = []
    restoring(lambda: calls.append(1))
    assert not calls


@pytest.mark.parametrize(
    ("before", "items", "after"),
    [
        ({1: "a", 2: "b"}, [(3, "c"), (1, "d")], {3: "c", 1: "d"}),
        (OrderedDict(a=1), [("b", 2), ("a", 3)], OrderedDict(b=2, a=3)),
        ({1, 2}, [3, 4], {3, 4}),
        (deque([1, 2], maxlen=2), [3], deque([3])),
    ],
)
def test_an_interrupt_finds_a_container_as_before_or_refilled(before, items, after):
    containers: list[Any] = []

    def scenario() -> None:
        containers.append(before.copy())
        refill(containers[-1], items)

    found = [containers[-1] for _ in interruptions(scenario, opcodes=True)]
    assert all(each in (before, after) for each in found)
    assert before in found
    assert after in found

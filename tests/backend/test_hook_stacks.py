"""Torch's stacks of modes and hooks: one can be put below, and taken out, of others."""

from itertools import permutations
from typing import Any

import pytest
import torch

from recoup.backend.autograd.hook_stacks import (
    StacksSnapshot,
    enter_at_bottom,
    leave_anywhere,
    push_hooks_at_bottom,
    take_out_hooks,
)
from recoup.backend.autograd.saved_tensors import ambient_hooks, pop_hooks, push_hooks
from recoup.backend.operators.dispatch import OperatorMode


class Noting(OperatorMode):
    """Notes in a list that it saw an operator."""

    def __init__(self, name: str, seen: list[str]) -> None:
        super().__init__()
        self._name, self._seen = name, seen

    def __torch_dispatch__(self, func: Any, types, args=(), kwargs=None) -> Any:
        self._seen.append(self._name)
        return func(*args, **(kwargs or {}))


def seen_by(seen: list[str]) -> list[str]:
    seen.clear()
    torch.ones(1).add(1)
    return seen[: len(seen) // 2]  # two operators


@pytest.mark.parametrize("order", list(permutations("abc")))
def test_a_mode_at_the_bottom_leaves_from_anywhere(order):
    seen: list[str] = []
    modes = {name: Noting(name, seen) for name in "abc"}
    modes["b"].__enter__()
    modes["c"].__enter__()
    enter_at_bottom(modes["a"])
    active = ["c", "b", "a"]  # torch asks the top first
    assert seen_by(seen) == active
    for name in order:
        leave_anywhere(modes[name])
        active.remove(name)
        assert seen_by(seen) == active
    leave_anywhere(modes["a"])  # it is gone already
    assert seen_by(seen) == []


def test_a_mode_above_is_left_as_usual_while_one_is_at_the_bottom():
    seen: list[str] = []
    below = Noting("below", seen)
    with Noting("above", seen):
        enter_at_bottom(below)
    assert seen_by(seen) == ["below"]
    leave_anywhere(below)
    assert seen_by(seen) == []
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2


def hooks(name: str) -> tuple[Any, Any]:
    return (lambda tensor: (name, tensor)), (lambda packed: packed[1])


@pytest.mark.parametrize("taken", range(3))
def test_hooks_are_taken_out_from_anywhere_and_the_others_stay_in_order(taken):
    pairs = [hooks(name) for name in "abc"]
    push_hooks(*pairs[1])
    push_hooks(*pairs[2])
    push_hooks_at_bottom(*pairs[0])
    take_out_hooks(pairs[taken][0])
    del pairs[taken]
    for pair in reversed(pairs):
        assert ambient_hooks() == pair
        pop_hooks()
    assert ambient_hooks() is None


def test_a_snapshot_takes_off_what_came_since_and_nothing_else():
    seen: list[str] = []
    mine, theirs = Noting("mine", seen), Noting("theirs", seen)
    ours, others = hooks("ours"), hooks("others")
    with mine:
        push_hooks(*ours)
        snapshot = StacksSnapshot()
        theirs.__enter__()
        push_hooks(*others)
        snapshot.restore()
        assert ambient_hooks() == ours
        assert seen_by(seen) == ["mine"]
        pop_hooks()
    assert seen_by(seen) == []

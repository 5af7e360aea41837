"""What regions cost the host: Python calls, which a model of small operators waits for.

The bounds are the calls of today: a step may not make more.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from recoup import CheckpointScope, KeepCostly, Plan, apply_plan, checkpoint_module
from recoup.core.plan import Place, Span
from recoup.engine.replay.recomputing import SECONDS
from recoup.engine.replay.replay_cache import ReplayCache
from recoup.errors import ChangedTensorError
from tests.engine.test_partial_replay import (
    SHARES,
    Graph,
    graphs,
    in_region,
    region_of,
)
from tests.support.models import Block
from tests.support.work import calls_of

BLOCKS = 12


class Calls(NamedTuple):
    """Calls of functions of recoup in one step."""

    forward: int
    backward: int


class Stack(nn.Module):
    """Blocks of a GPT, each in a region of its own if `region` makes one."""

    def __init__(self, dropout: float, region: Callable | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32, 4, dropout) for _ in range(BLOCKS))
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.region is None:
                x = block(x)
            else:
                with self.region("block"):
                    x = block(x)
        return x


def scopes(dropout: float) -> nn.Module:
    return Stack(dropout, CheckpointScope)


def costly(dropout: float) -> nn.Module:
    return Stack(dropout, partial(CheckpointScope, policy=KeepCostly()))


def modules(dropout: float) -> nn.Module:
    model = Stack(dropout)
    for block in model.blocks:
        checkpoint_module(block)
    return model


def plan(dropout: float) -> nn.Module:
    model = Stack(dropout)
    names = [f"blocks.{number}" for number in range(BLOCKS)]
    spans = [Span(Place(each, 0, True), Place(each, 0, False)) for each in names]
    apply_plan(model, Plan(tuple(spans)))
    return model


def calls_of_a_step(model: nn.Module) -> Calls:
    x = torch.randn(2, 8, 32, requires_grad=True)
    losses: list[Tensor] = []

    def forward() -> None:
        losses.append(model(x).square().mean())

    SECONDS.clear()  # another test may have asked for the time of replays
    for _ in range(6):  # the first ones are verified
        forward()
        losses.pop().backward()
    return Calls(calls_of(forward), calls_of(lambda: losses.pop().backward()))


BOUNDS = {
    (scopes, 0.0): Calls(4618, 1753),
    (scopes, 0.1): Calls(9034, 2521),
    (costly, 0.0): Calls(5290, 1958),
    (modules, 0.0): Calls(4510, 1741),
    (modules, 0.1): Calls(8926, 2509),
    (plan, 0.0): Calls(4763, 1765),
    (plan, 0.1): Calls(9179, 2269),
}


@pytest.mark.parametrize(("kind", "dropout"), BOUNDS)
def test_a_step_makes_no_more_calls_than_it_did(kind, dropout):
    found, bound = calls_of_a_step(kind(dropout)), BOUNDS[kind, dropout]
    assert found.forward <= bound.forward, found
    assert found.backward <= bound.backward, found


def test_a_linear_layer_without_bias_is_recorded_as_one_operation():
    x = torch.randn(1, 4, 8, requires_grad=True)
    layer = nn.Linear(8, 8, bias=False)
    with CheckpointScope("linear", verify="off") as scope:
        y = layer(x).tanh().sin()
    region = region_of(scope)
    # torch multiplies matrices, and views the product without calling that a view
    names = [operation.kernel.facts.name for operation in region.tape.operations]
    assert names == ["aten.mm.default", "aten.tanh.default"]
    y.sum().backward()


def test_the_counter_counts_calls_of_the_library_alone():
    x = torch.ones(3, requires_grad=True)
    assert calls_of(lambda: nn.Linear(3, 3)(x).sum().backward()) == 0
    with CheckpointScope("counted"):
        y = x.sin().sin()
    assert calls_of(lambda: y.sum().backward()) > 0


@given(graph=graphs(kinds=tuple(SHARES)))
def test_a_program_has_one_end_if_its_last_operation_needs_all_others(graph):
    x = torch.linspace(0.1, 0.9, 3, requires_grad=True)
    outputs, region = in_region(graph, x, verify="off")
    program = None if region is None else region._program
    if program is None or not program.operations:
        return
    needed = {program.operations[-1]}
    for operation in reversed(program.operations):
        if operation in needed:
            made = [value.producer for value in operation.reads() if not value.hold]
            needed.update(program.operations[place] for place in made)
    assert program.has_one_end == (needed == set(program.operations))
    del outputs


@given(graph=graphs(kinds=tuple(SHARES)))
def test_a_part_is_what_its_last_operation_needs_and_nothing_else_does(graph):
    x = torch.linspace(0.1, 0.9, 3, requires_grad=True)
    outputs, region = in_region(graph, x, verify="off")
    program = None if region is None else region._program
    if program is None:
        return
    makers = [
        {value.producer for value in operation.reads() if value.hold is None}
        for operation in program.operations
    ]
    for place in range(len(makers)):
        needed = {place}
        for other in range(place, -1, -1):
            if other in needed:
                needed |= makers[other]
        others = set(range(len(makers))) - needed
        is_apart = all(makers[other].isdisjoint(needed) for other in others)
        is_last = not any(place in read for read in makers)
        found = program.part_at(place)
        assert (found is not None) == (is_apart and is_last)
        if found is not None:
            part, made = found
            assert list(part) == sorted(needed)
            assert made == [v for v in program.wanted if v.producer in needed]
    del outputs


def test_parts_that_a_policy_cuts_are_replayed_without_a_search(monkeypatch):
    def search(*_):
        raise AssertionError("searched")

    monkeypatch.setattr(ReplayCache, "plan", search)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(4)))
    x = torch.ones(2, 4, requires_grad=True)
    expected = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    with CheckpointScope("cut", policy=KeepCostly(), verify="off") as scope:
        y = net(x)
    found = torch.autograd.grad(y.sum(), list(net.parameters()))
    assert all(map(torch.equal, found, expected))
    assert scope.statistics.replays == 1
    assert scope.statistics.replayed_operators == 3  # nobody saves the last


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_ends_that_share_what_autograd_keeps_are_replayed_without_a_search(
    order, monkeypatch
):
    def search(*_):
        raise AssertionError("searched")

    def two(x: Tensor) -> list[Tensor]:
        shared = x.exp().sin()  # read by both ends, and saved by both
        return [(shared * shared).tanh(), shared.cos().sigmoid()]

    def gradients(outputs: list[Tensor]) -> list[Tensor]:
        one_by_one = [outputs[end].sum() for end in order]
        found = [torch.autograd.grad(y, x, retain_graph=True)[0] for y in one_by_one]
        return [*found, torch.autograd.grad(one_by_one, x)[0]]

    monkeypatch.setattr(ReplayCache, "plan", search)
    x = torch.linspace(0.1, 0.9, 3, requires_grad=True)
    with CheckpointScope("shared", verify="off") as scope:
        outputs = two(x)
    assert all(map(torch.equal, gradients(outputs), gradients(two(x))))
    # Each output needs two of its own and two that both need.
    assert scope.statistics.replayed_operators == 4 + 4 + 6


def test_a_shared_value_that_a_backward_function_writes_to_is_noticed():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, *gradients: Tensor) -> Tensor:
            ctx.saved_tensors[0].zero_()
            return gradients[0] * 2

    x = torch.linspace(0.1, 0.9, 3, requires_grad=True)
    with CheckpointScope("shared", verify="off"):
        shared = x.exp()
        ends = [shared.sin().sigmoid(), Doubled.apply(shared).tanh()]
    with pytest.raises(ChangedTensorError):
        torch.stack(ends).sum().backward()


def test_a_scope_that_is_gone_is_not_counted_for_and_one_that_lives_is():
    x = torch.ones(3, requires_grad=True)
    counts = []
    for lives in (False, True):
        scopes = [CheckpointScope("counted", verify="off")]
        with scopes[0]:
            y = x.sin().sin().sum()
        if not lives:
            scopes.clear()
        counts.append(calls_of(y.backward))
        for scope in scopes:
            assert scope.statistics.recomputed_bytes == 12
            assert scope.statistics.freed_bytes == 12
    assert counts[0] < counts[1]


@pytest.mark.parametrize("before", [0, 3])
def test_what_needs_everything_is_replayed_without_a_search(before, monkeypatch):
    searches: list[ReplayCache] = []
    search = ReplayCache.plan

    def count(recall: ReplayCache, *arguments):
        searches.append(recall)
        return search(recall, *arguments)

    monkeypatch.setattr(ReplayCache, "plan", count)
    # What nobody saves is not on the tape in the end: places move.
    chain = Graph([("add", (0, 0))] * before + [("exp", (0,)), ("sin", (before + 1,))])
    chain.lines.append(("tanh", (before + 2,)))
    chain.outputs.append(before + 3)
    x = torch.linspace(0.1, 0.9, 3, requires_grad=True)
    with CheckpointScope("chain", verify="off") as scope:
        (output,) = chain.run(x)
    region = region_of(scope)
    output.sum().backward()
    assert region.replayed_operators == 3
    assert searches == []

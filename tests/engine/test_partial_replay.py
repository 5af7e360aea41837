"""A backward replays the ancestors of the values that it asks for, each once."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from recoup import CheckpointScope, keep
from recoup.engine.recording.region import Region
from recoup.engine.verification.verification_log import LEDGER
from recoup.errors import MismatchError

INPUT, RESULT = "input", "result"
SAVES = {"sin": INPUT, "cos": INPUT, "exp": RESULT, "tanh": RESULT, "mul": INPUT}
SHARES = {**SAVES, "add": None}
"""What autograd saves of each operator, written down from derivatives.yaml."""


@dataclass
class Graph:
    """Operators on earlier values; value 0 comes from outside.

    Attributes:
        lines: The operator and the values it takes, of value 1, 2, …
        outputs: The values that backward may start from.
    """

    lines: list[tuple[str, tuple[int, ...]]]
    outputs: list[int] = field(default_factory=list)

    def run(self, x: Tensor) -> list[Tensor]:
        values = [x]
        for name, taken in self.lines:
            values.append(getattr(torch, name)(*(values[at] for at in taken)))
        return [values[at] for at in self.outputs]

    def needed(self, outputs: list[int]) -> set[int]:
        """Return the operators whose results backward from these outputs needs."""
        saved: set[int] = set()
        for node in self._ancestors(set(outputs)):
            name, taken = self.lines[node - 1]
            if SHARES[name] == INPUT:
                saved.update(taken)
            elif SHARES[name] == RESULT:
                saved.add(node)
        return self._ancestors(saved)

    def _ancestors(self, values: set[int]) -> set[int]:
        found: set[int] = set()
        stack = list(values)
        while stack:
            value = stack.pop()
            if value > 0 and value not in found:
                found.add(value)
                stack.extend(self.lines[value - 1][1])
        return found


@st.composite
def graphs(draw, kinds=tuple(SAVES)) -> Graph:
    lines = []
    for value in range(1, draw(st.integers(2, 16)) + 1):
        name = draw(st.sampled_from(kinds))
        taken = st.integers(0, value - 1)
        arity = 2 if name in ("mul", "add") else 1
        lines.append((name, tuple(draw(taken) for _ in range(arity))))
    last = st.integers(1, len(lines))
    return Graph(lines, draw(st.lists(last, min_size=1, max_size=4, unique=True)))


def in_region(graph: Graph, x: Tensor, **options) -> tuple[list[Tensor], Region | None]:
    with CheckpointScope("graph", **options) as scope:
        outputs = graph.run(x)
    return outputs, region_of(scope) if scope.nodes else None


def region_of(scope: CheckpointScope) -> Region:
    region = scope.nodes[0].region
    assert isinstance(region, Region)
    return region


def gradient(outputs: list[Tensor], x: Tensor) -> Tensor:
    total = torch.stack([output.sum() for output in outputs]).sum()
    return torch.autograd.grad(total, x, retain_graph=True)[0]


def chosen(data: st.DataObject, graph: Graph) -> list[int]:
    places = st.integers(0, len(graph.outputs) - 1)
    return data.draw(st.lists(places, min_size=1, unique=True))


@pytest.mark.parametrize("verify", ["off", "first"])
@given(graph=graphs(), data=st.data())
def test_a_backward_replays_exactly_the_ancestors_of_what_it_needs(verify, graph, data):
    x = torch.linspace(0.1, 0.9, 3, requires_grad=True)
    twin = graph.run(x)
    outputs, region = in_region(graph, x, verify=verify)
    expected = 0
    for _ in range(3):
        places = chosen(data, graph)
        expected += len(graph.needed([graph.outputs[at] for at in places]))
        ours = gradient([outputs[at] for at in places], x)
        assert torch.equal(ours, gradient([twin[at] for at in places], x))
        assert (region.replayed_operators if region else 0) == expected


@given(graph=graphs(), data=st.data())
def test_with_a_cache_no_operator_runs_twice_in_several_backwards(graph, data):
    x = torch.linspace(0.1, 0.9, 3, requires_grad=True)
    twin = graph.run(x)
    outputs, region = in_region(graph, x, verify="off", cache=True)
    needed: set[int] = set()
    for _ in range(3):
        places = chosen(data, graph)
        needed |= graph.needed([graph.outputs[at] for at in places])
        ours = gradient([outputs[at] for at in places], x)
        assert torch.equal(ours, gradient([twin[at] for at in places], x))
        assert (region.replayed_operators if region else 0) == len(needed)


@given(graph=graphs(kinds=tuple(SHARES)), data=st.data())
def test_values_that_nobody_saves_are_shared_and_not_recomputed_twice(graph, data):
    x = torch.linspace(0.1, 0.9, 3, requires_grad=True)
    twin = graph.run(x)
    outputs, region = in_region(graph, x, verify="off")
    before = 0
    for places in (chosen(data, graph), list(range(len(outputs)))):
        ours = gradient([outputs[at] for at in places], x)
        assert torch.equal(ours, gradient([twin[at] for at in places], x))
        count = (region.replayed_operators if region else 0) - before
        least = graph.needed([graph.outputs[at] for at in places])
        assert len(least) <= count <= len(graph.needed(graph.outputs))
        before += count


@given(graph=graphs(kinds=tuple(SHARES)))
def test_what_is_kept_for_later_is_no_larger_than_what_autograd_saved(graph):
    x = torch.linspace(0.1, 0.9, 3, requires_grad=True)
    outputs, region = in_region(graph, x, verify="off")
    if region is None:
        return  # nothing was saved
    held: list[int] = []

    def look(gradient: Tensor) -> None:
        recall = region.recall
        if recall is not None:
            tensors = recall.live.values()
            held.append(len({t.untyped_storage().data_ptr() for t in tensors}))

    saved = sum(value.hold is None for value in region.tape.saved)
    for output in outputs:
        output.register_hook(look)
    gradient(outputs, x)
    assert max(held, default=0) <= saved


def two_outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    trunk = x + 1
    return trunk.exp().exp(), trunk.tanh().tanh()


def test_a_value_that_two_outputs_share_is_there_for_both():
    x = torch.randn(8, requires_grad=True)
    with CheckpointScope("two", verify="off") as scope:
        first, second = two_outputs(x)
    region = region_of(scope)
    (first.sum() + second.sum()).backward()
    assert (region.replays, region.replayed_operators) == (1, 5)


def test_what_is_written_in_place_is_not_written_for_the_other_output():
    def write(x: Tensor) -> tuple[Tensor, Tensor]:
        trunk = x + 1
        older = trunk.clone().tanh()
        written = trunk.mul_(3)
        return older, written.exp() * written.clone().sin_()

    x = torch.randn(8, dtype=torch.float64, requires_grad=True)
    for order in ((0, 1), (1, 0)):
        with CheckpointScope("written", verify="full"):
            ours = write(x)
        twin = write(x)
        for place in order:
            (got,) = torch.autograd.grad(ours[place].sum(), x, retain_graph=True)
            (expected,) = torch.autograd.grad(twin[place].sum(), x, retain_graph=True)
            assert torch.equal(got, expected)


def test_small_results_are_recomputed_before_something_large_is_kept_for_them():
    x = torch.randn(8, 1000, requires_grad=True)
    with CheckpointScope("small", verify="off") as scope:
        large = x + 1
        small = large.mean(1).exp()
        last = large.tanh()
    region = region_of(scope)
    held: list[int] = []

    def look(gradient: Tensor) -> None:  # after the backward of tanh
        if region.recall is not None:
            held.extend(tensor.nbytes for tensor in region.recall.live.values())

    small.register_hook(look)
    (last.sum() + small.sum()).backward()
    assert region.replayed_operators == 4
    assert held == [small.nbytes]


def test_an_output_of_a_layer_that_is_not_used_is_not_replayed():
    cell = nn.LSTMCell(4, 4)
    x, h, c = (torch.randn(2, 4, requires_grad=True) for _ in range(3))
    with CheckpointScope("heads", verify="off") as scope:
        state, memory = cell(x, (h, c))
        head = functional.gelu(state)
        other = memory.exp().exp().exp()
    region = region_of(scope)
    head.sum().backward(retain_graph=True)
    first = region.replayed_operators
    (head.sum() + other.sum()).backward()
    assert region.replayed_operators == first + (first + 3)


def test_a_kept_value_cuts_what_is_replayed():
    x = torch.randn(8, requires_grad=True)
    with CheckpointScope("kept", verify="off") as scope:
        trunk = keep(x.sin().sin().sin())
        first, second = trunk.exp(), trunk.tanh()
    region = region_of(scope)
    second.sum().backward(retain_graph=True)
    assert region.replayed_operators == 2 + 1  # sin saves its input; tanh its result
    first.sum().backward()
    assert region.replayed_operators == 2 * (2 + 1)


def test_a_nested_region_asks_the_outer_one_only_for_what_it_needs():
    x = torch.randn(8, requires_grad=True)
    with CheckpointScope("outer", verify="off") as outer:
        unused = x
        for _ in range(5):
            unused = unused.sin()
        trunk = x.exp()
        with CheckpointScope("inner", verify="off") as inner:
            result = trunk.sin().sin()
    regions = [region_of(scope) for scope in (outer, inner)]
    result.sum().backward()
    assert [region.replayed_operators for region in regions] == [1, 1]
    (expected,) = torch.autograd.grad(x.exp().sin().sin().sum(), x)
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_many_backwards_through_one_region_cost_what_each_needs():
    x = torch.randn(2, requires_grad=True)
    with CheckpointScope("many", verify="off") as scope:
        outputs = [(x * place).exp().exp() for place in range(200)]
    region = region_of(scope)
    for output in outputs:
        output.sum().backward(retain_graph=True)
    assert region.replayed_operators == 200 * 3


class TestVerification:
    def run(self, name: str):
        x = torch.randn(8, requires_grad=True)
        with CheckpointScope(name) as scope:
            first, second = x.exp().exp(), x.tanh().tanh()
        return first, second, scope._key

    def test_a_region_has_passed_when_all_its_parts_have(self):
        first, second, key = self.run("parts")
        assert LEDGER.needs(key)
        first.sum().backward(retain_graph=True)
        assert LEDGER.needs(key)
        second.sum().backward()
        assert not LEDGER.needs(key)

    def test_a_part_that_is_never_asked_for_is_not_waited_for(self):
        def step():
            first, second, key = self.run("never asked")
            first.sum().backward()
            return LEDGER.needs(key), second

        assert [step()[0] for _ in range(5)] == [True, True, True, False, False]

    def test_a_part_that_differs_is_reported_by_the_backward_that_needs_it(self):
        x = torch.randn(8, requires_grad=True)
        other = torch.randn(8)
        with CheckpointScope("differs"):
            first, second = x.exp().exp(), (x * other).tanh().tanh()
        other.data.add_(1)
        first.sum().backward(retain_graph=True)
        with pytest.raises(MismatchError):
            second.sum().backward()

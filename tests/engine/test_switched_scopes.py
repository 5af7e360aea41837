"""Scopes that are switched: a disabled one is not there; one that keeps does keep."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recoup import (
    CheckpointManager,
    CheckpointProfiler,
    CheckpointScope,
    apply_plan,
    checkpoint_module,
    keep,
    recompute,
)
from recoup.core.plan import Place, Plan, Span
from recoup.engine.recording.active import is_innermost, open_regions
from tests.support.counting import SavedByAutograd
from tests.support.watching import Replayed

WIDTH, LAYERS = 8, 4


class Net(nn.Module):
    """Layers, each in a region that the test chooses."""

    def __init__(self, region: Callable[[], Any] = contextlib.nullcontext) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(32, WIDTH))
            for _ in range(LAYERS)
        )
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with self.region():
                x = layer(x).tanh()
        return x


def disabled() -> CheckpointScope:
    return CheckpointScope("disabled", enabled=False)


def nodes_of(result: Tensor) -> list[str]:
    """Return the nodes of a graph by name, in the order of a walk through it."""
    found, stack = [], [result.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None:
            found.append(node.name())
            stack.extend(further for further, _ in node.next_functions)
    return found


def raw_saved(result: Tensor) -> list[type]:
    """Return the types of what stands for saved tensors in the last node."""
    node = result.grad_fn
    names = [name for name in dir(node) if name.startswith("_raw_saved_")]
    return [type(getattr(node, name)) for name in names]


def replayed_by(net: nn.Module, x: Tensor) -> tuple[int, list[Tensor]]:
    with Replayed() as replayed:
        net(x).square().sum().backward()
    return replayed.total, [
        parameter.grad.clone()
        for parameter in net.parameters()
        if parameter.grad is not None
    ]


class TestDisabled:
    def test_the_graph_and_the_saved_bytes_are_those_without_a_scope(self):
        x = torch.randn(2, WIDTH)
        with SavedByAutograd() as plain:
            twin = Net()(x)
        with SavedByAutograd() as saved:
            ours = Net(disabled)(x)
        assert nodes_of(ours) == nodes_of(twin)
        assert raw_saved(ours) == raw_saved(twin)
        assert saved.bytes_without() == plain.bytes_without()
        count, gradients = replayed_by(Net(disabled), x)
        assert count == 0
        assert all(map(torch.equal, gradients, replayed_by(Net(), x)[1]))

    def test_a_region_of_a_plan_reaches_over_its_end(self):
        # It begins in one disabled scope and ends in another: layers 1 and 2 as one.
        span = Span(Place("layers.1", 0, True), Place("layers.2", 0, False))
        x, kept = torch.randn(2, WIDTH), []
        for net in (Net(), Net(disabled)):
            applied = apply_plan(net, Plan((span,)))
            with SavedByAutograd() as saved:
                y = net(x)
            kept.append(saved.bytes_without())
            count, gradients = replayed_by(net, x)
            kept += [count, *(gradient.tolist() for gradient in gradients)]
            del y
            applied.remove()
        assert kept[: len(kept) // 2] == kept[len(kept) // 2 :]

    def test_it_is_not_seen_by_regions_observers_and_owners(self):
        x = torch.randn(2, WIDTH, requires_grad=True)
        manager = CheckpointManager()
        scope = disabled()
        manager.register_scope(scope)
        with manager, CheckpointProfiler() as profiler, scope:
            assert open_regions() == []
            assert not is_innermost(scope) or scope.nodes == []
            y = x.exp().sin()
        assert profiler.checkpoint_count() == 0
        assert profiler.memory_saved() == 0
        assert (manager.nodes, manager.total_memory_bytes(), scope.nodes) == ([], 0, [])
        y.sum().backward()

    def test_an_outer_scope_records_through_it(self):
        x = torch.randn(2, WIDTH)
        counts = []
        for inner in (contextlib.nullcontext, disabled):
            scope = CheckpointScope("outer", verify="off")
            net = Net(inner)
            with scope:
                y = net(x)
            counts.append([scope.memory_bytes, len(open_regions())])
            with Replayed() as replayed:
                y.sum().backward()
            counts[-1].append(replayed.total)
        assert counts[0] == counts[1]

    @pytest.mark.parametrize("around", ["disabled", "without gradients"])
    def test_a_region_of_a_plan_ends_inside_it(self, around):
        class Wrapped(Net):
            def forward(self, x: Tensor) -> Tensor:
                x = self.layers[0](x)
                scope = CheckpointScope("idle", enabled=around != "disabled")
                with torch.set_grad_enabled(around == "disabled"):
                    scope.__enter__()
                x = self.layers[1](x)
                scope.close()
                return self.layers[2](x)

        x = torch.randn(2, WIDTH)
        expected = replayed_by(Wrapped(), x)[1]
        net = Wrapped()
        start, stop = Place("layers.0", 0, True), Place("layers.1", 0, False)
        applied = apply_plan(net, Plan((Span(start, stop),)), verify="off")
        open_then: list[int] = []
        net.layers[2].register_forward_pre_hook(
            lambda *_: open_then.append(len(open_regions()))
        )
        count, gradients = replayed_by(net, x)
        applied.remove()
        assert open_then == [0]
        assert count == 5  # two layers without their last matrix product
        assert all(map(torch.equal, gradients, expected))

    def test_segments_of_blocks_end_inside_it(self):
        x = torch.randn(2, WIDTH)
        found = []
        for around in (contextlib.nullcontext, disabled):

            class Around(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.net = Net()

                def forward(self, x: Tensor) -> Tensor:
                    for layer in self.net.layers:
                        with around():  # noqa: B023 (used in this turn)
                            x = layer(x)
                    return x

            model = Around()
            checkpoint_module(model, segment_size=1)
            with CheckpointProfiler() as profiler:
                model(x).sum().backward()
            found.append((profiler.checkpoint_count(), profiler.memory_saved()))
        assert found[0] == found[1]
        assert found[0][0] == LAYERS

    def test_scopes_of_both_kinds_may_be_left_in_any_order(self):
        x = torch.randn(4, requires_grad=True)
        active, off = CheckpointScope("active"), disabled()
        active.__enter__()
        off.__enter__()
        y = x.exp().sin()
        active.close()
        assert open_regions() == []
        off.close()
        off.close()
        with active:
            off.__enter__()
            y = y + x.exp().sin()
        off.close()
        assert open_regions() == []
        y.sum().backward()


class TestKeeping:
    """An inner `use_recomputation=False` keeps, whatever is around it."""

    def run(self, depth: int, **options) -> tuple[Tensor, Tensor, Tensor, list]:
        x = torch.randn(2, WIDTH, dtype=torch.float64, requires_grad=True)
        scopes = [CheckpointScope(f"outer {n}", verify="off") for n in range(depth)]
        inner = CheckpointScope("inner", use_recomputation=False, **options)
        with contextlib.ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(scope)
            before = x.sin().exp()
            with inner:
                inside = before.exp().sin().tanh()
            after = inside.cos().sin()
        return x, before, after, [*scopes, inner]

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_what_is_saved_in_it_is_kept_and_not_replayed(self, depth):
        x, before, after, scopes = self.run(depth)
        assert len(scopes[-1].nodes[0].saved_activations) == 2  # exp, tanh
        assert scopes[-1].memory_bytes == 2 * before.nbytes
        assert scopes[0].memory_bytes == 2 * before.nbytes + x.nbytes
        with Replayed() as replayed:
            after.sum().backward()
        # Inside nothing is replayed; outside exp saves its result, and sin its input.
        assert replayed.operators == {"sin": 1, "exp": 1, "cos": 1}
        expected = x.detach().requires_grad_()
        expected.sin().exp().exp().sin().tanh().cos().sin().sum().backward()
        assert x.grad is not None
        assert expected.grad is not None
        assert torch.equal(x.grad, expected.grad)

    def test_all_that_autograd_saves_in_it_is_kept(self):
        x = torch.randn(2, WIDTH, requires_grad=True)
        with CheckpointScope("outer", verify="off"):
            h = x * 2
            with CheckpointScope("inner", use_recomputation=False):
                y = (h * h).sin()
        with Replayed() as replayed:
            y.sum().backward()
        assert replayed.total == 0

    def test_a_mark_inside_is_an_exception(self):
        x = torch.randn(2, WIDTH, requires_grad=True)
        inner = CheckpointScope("inner", use_recomputation=False)
        with CheckpointScope("outer", verify="off"), inner:
            z = recompute(keep(x.exp()).sin())
            y = z.sin()
        with Replayed() as replayed:
            y.sum().backward()
        assert replayed.operators == {"sin": 1}

    def test_nothing_is_left_of_the_regions_around(self):
        after, scopes = self.run(2)[2:]
        region = scopes[-1].nodes[0].region
        assert region is not None
        assert getattr(region, "around", ()) == ()
        del after, region
        assert [scope.nodes for scope in scopes] == [[], [], []]

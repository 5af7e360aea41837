"""Statistics outlive backward, and say what an independent count says."""

import copy
import gc
import io
import pickle
import sys
import weakref
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from recoup import (
    ActivationCheckpointer,
    CheckpointGroup,
    CheckpointManager,
    CheckpointProfiler,
    CheckpointScope,
    Device,
    Disk,
    EightBit,
    Half,
    Host,
    KeepCostly,
    KeepSmall,
    MixedPrecisionScope,
    Packed,
    checkpoint,
    checkpoint_module,
)
from recoup.engine.replay.rerun import rerun
from tests.support.watching import CPU_STATE_BYTES, Replayed, saved_bytes

WIDTH = 16


def block(x: Tensor) -> Tensor:
    return x.exp().sin().tanh()


def leaf() -> Tensor:
    return torch.linspace(-1, 1, WIDTH, requires_grad=True)


class TestScopes:
    def test_n_calls_and_backwards_are_counted_n_times_and_stay(self):
        scope = CheckpointScope("block", verify="off")
        x = leaf()
        with Replayed() as replayed:
            for _ in range(7):
                with scope:
                    y = block(x)
                y.sum().backward()
                del y
        found = scope.statistics
        assert scope.nodes == []
        assert (found.calls, found.replays) == (7, 7)
        assert found.replayed_operators == replayed.total == 7 * 3
        # exp saves its result, which is what sin saves; tanh its own.
        assert found.freed_bytes == found.recomputed_bytes == 7 * 2 * x.nbytes
        assert found.kept_bytes == 7 * x.nbytes
        assert found.replay_seconds > 0

    def test_bytes_are_there_before_backward_and_counted_once(self):
        scope = CheckpointScope("block")
        x = leaf()
        with scope:
            y = block(x)
        before = scope.statistics
        assert (before.kept_bytes, before.freed_bytes) == (x.nbytes, 2 * x.nbytes)
        assert (before.replays, before.recomputed_bytes) == (0, 0)
        y.sum().backward()
        after = scope.statistics
        assert (after.kept_bytes, after.freed_bytes) == (x.nbytes, 2 * x.nbytes)
        assert after.recomputed_bytes == 2 * x.nbytes

    def test_kept_and_freed_bytes_are_those_that_autograd_saves(self):
        layer = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        x = torch.randn(4, WIDTH, requires_grad=True)
        plain = saved_bytes(lambda: layer(x), *layer.parameters())
        with CheckpointScope("layer") as scope:
            y = layer(x)
        found = scope.statistics
        assert found.kept_bytes + found.freed_bytes == plain
        assert found.kept_bytes == x.nbytes
        del y

    def test_one_that_keeps_is_accounted_for(self):
        x = leaf()
        with CheckpointScope("kept", use_recomputation=False) as scope:
            y = block(x)
        y.sum().backward()
        found = scope.statistics
        assert (found.calls, found.replays, found.freed_bytes) == (1, 0, 0)

    def test_a_backward_in_parts_is_one_replay(self):
        x = leaf()
        with CheckpointScope("parts", verify="off") as scope:
            first, second = x.exp().exp(), x.tanh().tanh()
        (first.sum() + second.sum()).backward()
        found = scope.statistics
        assert (found.replays, found.replayed_operators) == (1, 4)
        assert found.recomputed_bytes == 4 * x.nbytes

    def test_a_disabled_one_and_one_without_gradients_count_nothing(self):
        scope = CheckpointScope("off", enabled=False)
        with scope:
            block(leaf())
        scope.is_enabled = True
        with torch.no_grad(), scope:
            block(leaf())
        assert scope.statistics.calls == 0

    def test_a_node_knows_its_replays_after_its_region_is_gone(self):
        x = leaf()
        with CheckpointScope("node") as scope:
            y = block(x)
        node = scope.nodes[0]
        y.sum().backward()
        del y
        assert (node.is_alive, node.replay_count) == (False, 1)
        assert (node.kept_bytes, node.freed_bytes) == (x.nbytes, 2 * x.nbytes)


class TestGroupsManagersAndProfilers:
    def test_a_group_counts_after_its_graphs_are_gone(self):
        group = CheckpointGroup("group")
        x = leaf()
        for _ in range(3):
            group.checkpoint_fn((x,), lambda inputs: block(inputs[0])).sum().backward()
        assert (group.call_count, group.replay_count) == (3, 3)
        assert group.statistics.replayed_operators == 9

    def test_a_manager_counts_by_name_and_nothing_twice(self):
        manager = CheckpointManager()
        registered = CheckpointScope("registered")
        manager.register_scope(registered)
        x = leaf()
        for inside in (True, False):
            with manager if inside else torch.enable_grad():
                with registered:
                    y = block(x)
                for _ in range(2):
                    with CheckpointScope("other"):
                        y = y + block(x)
                y.sum().backward()
                del y
        table = manager.statistics
        calls = {row.name: (row.calls, row.replays) for row in table}
        assert calls == {"registered": (2, 2), "other": (2, 2)}
        assert table.total.calls == 4
        manager.unregister_scope(registered)
        with registered:
            block(x)
        assert manager.statistics["registered"].calls == 2
        assert registered.statistics.calls == 3
        manager.reset_statistics()
        assert len(manager.statistics) == 0

    def test_a_profiler_counts_all_kinds_of_regions(self):
        x, module = leaf(), nn.Tanh()
        checkpoint_module(module)
        with CheckpointProfiler() as profiler:
            for _ in range(2):
                y = checkpoint(block, x) + rerun(block, x)
                y = y + module(x.exp())
                with CheckpointScope("scope"):
                    y = y + block(x)
                y.sum().backward()
                del y
        found = {row.name: (row.calls, row.replays) for row in profiler.statistics}
        assert found["scope"] == (2, 2)
        assert found["block"] == (4, 4)  # checkpoint and rerun of one function
        assert profiler.statistics.total.calls == profiler.checkpoint_count() == 8

    def test_untracked_regions_are_not_counted(self):
        profiler = CheckpointProfiler()
        checkpoint(block, leaf())
        with profiler:
            checkpoint(block, leaf())
        checkpoint(block, leaf())
        assert profiler.statistics.total.calls == 1

    @pytest.mark.parametrize("frozen", [False, True])
    def test_a_weight_that_only_a_replay_needs_is_no_loss(self, frozen):
        model = nn.Sequential(nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 100))
        model[0].weight.requires_grad_(not frozen)
        tokens = torch.randint(0, 100, (4, 7))
        weights = list(model.parameters())
        plain = saved_bytes(lambda: model(tokens), *weights)
        with CheckpointProfiler() as profiler, CheckpointScope("model") as scope:
            y = model(tokens)
        kept = tokens.nbytes
        assert profiler.memory_saved() == plain - kept > 0
        assert scope.statistics.kept_bytes == kept
        assert profiler.parameter_bytes() >= weights[0].nbytes
        del y

    def test_generator_states_count_as_kept(self):
        x = leaf()
        with CheckpointScope("dropout") as scope:
            y = nn.functional.dropout(x.sin()).cos()
        assert scope.statistics.kept_bytes == x.nbytes + CPU_STATE_BYTES
        del y


class TestTheTable:
    def test_it_prints_a_line_for_each_name_and_the_total(self):
        manager, x = CheckpointManager(), leaf()
        with manager:
            for name in ("first", "second", "first"):
                with CheckpointScope(name):
                    y = block(x)
                y.sum().backward()
        lines = str(manager.statistics).splitlines()
        assert [line.split()[0] for line in lines] == [
            *("region", "first", "second", "total")
        ]
        assert len({len(line) for line in lines}) == 1
        assert lines[1].split()[1:4] == ["2", "2", "6"]
        with pytest.raises(KeyError, match="'first', 'second'"):
            _ = manager.statistics["third"]

    def test_rich_prints_it(self):
        console = Console(file=io.StringIO(), width=120)
        with CheckpointProfiler() as profiler:
            checkpoint(block, leaf()).sum().backward()
        console.print(profiler.statistics)
        shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
        assert "recomputed" in shown
        assert "block" in shown


class Net(nn.Module):
    """Holds everything that a module may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.scope = CheckpointScope("net")
        self.group = CheckpointGroup("group")
        self.manager = CheckpointManager()
        self.manager.register_scope(self.scope)
        self.profiler = CheckpointProfiler()
        self.node = None

    def forward(self, x: Tensor) -> Tensor:
        with self.manager, self.scope:
            x = torch.tanh(self.layer(x))
        self.node = self.scope.nodes[-1]
        return self.group.checkpoint_fn(x, block)


class Using(nn.Module):
    """Holds something that its forward uses in, or in place of, a scope."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        held = self.held
        if isinstance(held, ActivationCheckpointer):
            return held.checkpointed_forward(x, [0, 1], lambda h, _: self.run(h))
        if isinstance(held, KeepCostly | KeepSmall):
            held = CheckpointScope("a", policy=held)
        elif not isinstance(held, MixedPrecisionScope):
            held = CheckpointScope("a", store=held)
        with held:
            return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)).exp().sin()


HELD = [
    *(Device(), Half(), EightBit(), Packed(smallest_bytes=0)),
    *(Host(smallest_bytes=0), Disk(smallest_bytes=0)),
    *(KeepCostly(), KeepSmall(100), ActivationCheckpointer(), MixedPrecisionScope()),
]


def saved_and_loaded(net: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
    "deepcopy": copy.deepcopy,
    "torch.save": saved_and_loaded,
}


class TestCopies:
    @pytest.mark.parametrize("way", COPIES)
    @pytest.mark.parametrize("when", ["before", "with a graph", "after"])
    def test_a_module_that_holds_them_is_copied_at_any_time(self, way, when):
        net, x = Net(), torch.randn(2, 8)
        with net.profiler:
            y = net(x) if when != "before" else None
        if when == "after":
            assert y is not None
            y.sum().backward()
        other = COPIES[way](net)
        assert other.scope.nodes == []
        assert other.scope.statistics.calls == net.scope.statistics.calls
        assert other.manager.scopes == (other.scope,)
        if y is not None and when == "with a graph":
            y.sum().backward()
        # The copy works, and counts for itself.
        before = net.scope.statistics.calls
        other(x).sum().backward()
        assert other.scope.statistics.calls == before + 1
        assert net.scope.statistics.calls == before
        assert other.manager.statistics["net"].calls == before + 1

    @pytest.mark.parametrize("way", COPIES)
    @pytest.mark.parametrize("when", ["before", "with a graph", "after"])
    @pytest.mark.parametrize("held", HELD, ids=lambda held: type(held).__name__)
    def test_so_is_one_that_holds_stores_policies_and_checkpointers(
        self, way, when, held
    ):
        net, x = Using(held), torch.randn(64, 8)
        y = net(x) if when != "before" else None
        if when == "after":
            assert y is not None
            y.sum().backward()
        other = COPIES[way](net)
        if y is not None and when == "with a graph":
            y.sum().backward()
        found = []
        for each in (net, other):
            each.zero_grad()
            each(x).sum().backward()
            found.append([p.grad for p in each.parameters()])
        assert all(map(torch.equal, *found))

    def test_recording_makes_no_more_calls_than_before(self):
        """A scope counts without a function call of its own while it records."""
        names: list[str] = []

        def note(frame, event, _argument):
            if event == "call":
                names.append(frame.f_code.co_filename)

        scope, x = CheckpointScope("calls", verify="off"), leaf()
        sys.setprofile(note)
        try:
            with scope:
                y = block(x)
        finally:
            sys.setprofile(None)
        ours = sys.modules["recoup.engine.scopes.statistics"].__file__
        assert names
        assert ours not in names
        del y


def weak_references() -> int:
    gc.collect()
    return sum(issubclass(type(each), weakref.ref) for each in gc.get_objects())


@pytest.mark.parametrize("watch", [CheckpointProfiler, CheckpointManager])
def test_whoever_counts_keeps_nothing_of_regions_that_are_gone(watch):
    x = torch.ones(4, requires_grad=True)
    counted = watch()

    def run(times):
        for _ in range(times):
            with CheckpointScope("block"):
                y = x.exp().sin()
            y.sum().backward()

    with counted:
        run(20)
        before = weak_references()
        run(50)
        assert weak_references() <= before
    assert counted.statistics["block"].calls == 70

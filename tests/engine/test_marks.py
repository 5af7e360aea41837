"""Marks: one tensor is kept, or recomputed, whatever holds for the others."""

# Torch types what a module holds as Tensor | Module, and a gradient as maybe None.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recoup import CheckpointScope, KeepCostly, KeepSmall, checkpoint, keep, recompute
from recoup.checkpointing import (
    adaptive_checkpoint,
    checkpoint_count,
    clear_checkpoint_marks,
    is_checkpoint,
    mark_checkpoint,
    unmark_checkpoint,
)
from recoup.errors import UsageError
from tests.support.twin import leftovers
from tests.support.watching import Memory, Replayed

KIBIBYTE = 1024


@pytest.fixture(autouse=True)
def no_marks():
    """Start and end without marks."""
    clear_checkpoint_marks()
    yield
    clear_checkpoint_marks()


def leaf(count: int = 10) -> Any:
    return torch.linspace(-1, 1, count, requires_grad=True)


def chain_gradient() -> torch.Tensor:
    """The plain gradient of the chain that most tests below run in a scope."""
    x = leaf()
    x.exp().sin().cos().tanh().sum().backward()
    assert x.grad is not None
    return x.grad


class TestTheMark:
    @pytest.mark.parametrize("mark", [keep, mark_checkpoint])
    def test_marking_returns_the_very_tensor(self, mark):
        tensor = torch.ones(2)
        assert mark(tensor) is tensor
        assert is_checkpoint(tensor)

    def test_an_equal_tensor_is_not_marked(self):
        marked = keep(torch.ones(2))
        assert not is_checkpoint(torch.ones(2))
        assert not is_checkpoint(marked.view(2))
        assert not is_checkpoint("text")

    def test_a_mark_dies_with_its_tensor(self):
        tensors = [keep(torch.ones(2)) for _ in range(5)]
        memory = Memory(tensors[0])
        assert checkpoint_count() == 5
        del tensors[0]
        assert (checkpoint_count(), memory.is_freed) == (4, True)

    def test_marks_come_off_one_by_one_or_all_at_once(self):
        tensors = [keep(torch.ones(2)) for _ in range(3)]
        assert unmark_checkpoint(tensors[0]) is tensors[0]
        assert unmark_checkpoint(tensors[0]) is tensors[0]
        assert [is_checkpoint(tensor) for tensor in tensors] == [False, True, True]
        clear_checkpoint_marks()
        assert checkpoint_count() == 0

    def test_marking_again_counts_once(self):
        tensor = keep(keep(torch.ones(2)))
        assert (checkpoint_count(), is_checkpoint(tensor)) == (1, True)

    def test_threads_may_mark_at_once(self):
        kept, start = [], threading.Barrier(4)

        def work():
            start.wait()
            kept.extend(keep(torch.ones(1)) for _ in range(200))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert checkpoint_count() == 800

    @pytest.mark.parametrize("mark", [keep, unmark_checkpoint, recompute])
    def test_what_is_no_tensor_is_refused(self, mark):
        with pytest.raises(UsageError, match="expected a tensor, got list"):
            mark([torch.ones(2)])


class TestKeep:
    def replayed(self, mark):
        """What is replayed when `mark` is given the chain's second value."""
        x = leaf()
        with CheckpointScope("chain"):
            y = x.exp().sin()
            mark(y)
            y = y.cos().tanh()
        with Replayed() as replayed:
            y.sum().backward()
        assert torch.equal(x.grad, chain_gradient())
        return dict(replayed.operators)

    def test_replays_start_at_a_kept_tensor(self):
        everything = {"exp": 1, "sin": 1, "cos": 1, "tanh": 1}
        assert self.replayed(lambda y: y) == everything
        # exp is needed for its own derivative; from sin on replay starts at the mark.
        assert self.replayed(keep) == {"exp": 1, "cos": 1, "tanh": 1}

    def test_unmarking_in_the_scope_recomputes_after_all(self):
        everything = {"exp": 1, "sin": 1, "cos": 1, "tanh": 1}
        assert self.replayed(lambda y: unmark_checkpoint(keep(y))) == everything

    def test_a_kept_tensor_is_held_and_the_others_are_not(self):
        x = leaf(1000)
        scope = CheckpointScope("block")
        with scope:
            first = x.exp()
            second = keep(first.sin())
            memories = [Memory(first), Memory(second)]
            y = second.cos().tanh()
            del first, second
        assert memories[0].is_freed
        assert not memories[1].is_freed
        assert scope.memory_bytes == 2 * x.nbytes
        y.sum().backward()
        assert memories[1].is_freed

    def test_a_kept_tensor_that_nobody_needs_is_not_held(self):
        x = leaf(1000)
        with CheckpointScope("block"):
            useless = keep(x + 1)
            memory = Memory(useless)
            y = useless.sum() + x.exp().sum()
            del useless
        assert memory.is_freed
        y.backward()

    def test_a_tensor_is_kept_in_every_scope_around_it(self):
        x = leaf()
        with CheckpointScope("outer"):
            y = x.exp()
            with CheckpointScope("inner"):
                y = keep(y.sin())
                y = y.cos()
            y = y.tanh()
        with Replayed() as replayed:
            y.sum().backward()
        assert torch.equal(x.grad, chain_gradient())
        assert replayed.operators["sin"] == 0

    def test_a_mark_outside_a_scope_changes_nothing(self):
        x = leaf()
        outside = keep(x * 2)
        with CheckpointScope("block"):
            y = outside.exp().sin()
        y.sum().backward()
        twin = leaf()
        (twin * 2).exp().sin().sum().backward()
        assert torch.equal(x.grad, twin.grad)

    def test_a_mark_on_a_view_keeps_what_it_shows(self):
        x = leaf(12)
        with CheckpointScope("block"):
            y = x.exp().sin()
            keep(y.view(3, 4)[1:])
            y = y.cos().tanh()
        with Replayed() as replayed:
            y.sum().backward()
        assert replayed.operators["sin"] == 0
        twin = leaf(12)
        twin.exp().sin().cos().tanh().sum().backward()
        assert torch.equal(x.grad, twin.grad)

    def test_a_kept_tensor_written_to_afterwards_gives_right_gradients(self):
        def forward(mark):
            x = leaf()
            with CheckpointScope("block"):
                y = mark(x.exp())
                z = y * 3
                y = y.mul_(2)
                out = (y.sin() * z).tanh()
            out.sum().backward()
            return x.grad

        x = leaf()
        y = x.exp()
        z = y * 3
        ((y * 2).sin() * z).tanh().sum().backward()
        assert torch.equal(forward(lambda t: t), x.grad)
        assert torch.equal(forward(keep), x.grad)


class TestRecompute:
    def test_one_tensor_is_dropped_where_the_others_are_kept(self):
        x = leaf(1000)
        with CheckpointScope("block", use_recomputation=False):
            kept = x.exp()
            dropped = recompute(kept.sin())
            memories = [Memory(kept), Memory(dropped)]
            y = dropped.cos()
            del kept, dropped
        assert not memories[0].is_freed
        assert memories[1].is_freed
        with Replayed() as replayed:
            y.sum().backward()
        assert dict(replayed.operators) == {"sin": 1}
        twin = leaf(1000)
        twin.exp().sin().cos().sum().backward()
        assert torch.equal(x.grad, twin.grad)

    def test_it_returns_the_very_tensor(self):
        with CheckpointScope("block"):
            tensor = leaf() * 2
            assert recompute(tensor) is tensor
            assert checkpoint(tensor) is tensor

    def test_it_takes_a_keep_mark_off(self):
        with CheckpointScope("block"):
            tensor = recompute(keep(leaf() * 2))
        assert not is_checkpoint(tensor)

    @pytest.mark.parametrize(
        "policy", [KeepSmall(1 << 20), KeepCostly()], ids=["small", "costly"]
    )
    def test_marks_win_over_a_policy(self, policy):
        x = torch.randn(8, 8, requires_grad=True)

        def held(mark):
            scope = CheckpointScope("block", policy=policy)
            with scope:
                y = mark(x @ x)
                y = y.sin()
            found = scope.memory_bytes
            y.sum().backward()
            return found

        assert held(lambda t: t) == 2 * x.nbytes
        assert held(recompute) == x.nbytes

    def test_keeping_wins_over_a_policy_that_drops(self):
        x = torch.randn(8, 8, requires_grad=True)
        scope = CheckpointScope("block", policy=KeepCostly())
        with scope:
            y = keep(x.exp()).sin()
        assert len(scope.nodes[0].saved_activations) == 1
        with Replayed() as replayed:
            y.sum().backward()
        assert replayed.total == 0


def disabled() -> CheckpointScope:
    return CheckpointScope("disabled", enabled=False)


WHERE = {
    "no scope": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "a scope": lambda: CheckpointScope("scope"),
    "a scope that keeps": lambda: CheckpointScope("keeps", use_recomputation=False),
    "a disabled scope": disabled,
}
AROUND = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "a disabled scope": disabled,
    "a scope": lambda: CheckpointScope("outer"),
}
MARKS = {
    "checkpoint": checkpoint,
    "recompute": recompute,
    "keep": keep,
    "mark_checkpoint": mark_checkpoint,
    "unmark_checkpoint": unmark_checkpoint,
    "adaptive_checkpoint": lambda tensor: adaptive_checkpoint(tensor, 0),
}
GIVEN = {
    "a result": lambda x: torch.relu(x @ x),
    "a leaf": lambda x: x,
    "frozen": lambda x: torch.relu(x.detach() @ x.detach()),
    "detached": lambda x: torch.relu(x @ x).detach(),
    "a view": lambda x: (x @ x).T[1:],
    "never run twice": lambda x: x.detach().exp().multinomial(2),
    "sparse": lambda x: x.detach().to_sparse(),
    "empty": lambda x: x[:0],
    "meta": lambda x: torch.ones(3, device="meta"),
}


class TestAnywhere:
    @pytest.mark.parametrize("where", WHERE)
    @pytest.mark.parametrize("around", AROUND)
    @pytest.mark.parametrize("mark", MARKS)
    def test_a_mark_returns_the_tensor_and_changes_no_value(self, where, around, mark):
        def run(mark) -> list[Tensor]:
            x = torch.arange(9.0).reshape(3, 3).requires_grad_()
            outside = x * 2
            with AROUND[around](), WHERE[where]():
                result = mark(torch.relu(x @ mark(outside)))
                for make in GIVEN.values():
                    mark(make(x))
                result = result.sin()
            if result.requires_grad:
                result.sum().backward()
            return [result.detach(), torch.zeros(3) if x.grad is None else x.grad]

        def marked(tensor: Tensor) -> Tensor:
            assert MARKS[mark](tensor) is tensor
            return tensor

        assert list(map(torch.equal, run(marked), run(lambda t: t))) == [True, True]
        clear_checkpoint_marks()
        assert list(leftovers()) == []

    def test_the_lines_of_the_guide_run_as_they_are(self):
        x = torch.ones(128, 128, requires_grad=True)
        y = torch.matmul(x, x)
        z = checkpoint(torch.relu(y))
        threshold = 10 * 1024
        result = adaptive_checkpoint(z, threshold)
        result.sum().backward()
        assert torch.equal(x.grad, torch.full((128, 128), 256.0))

    def test_a_model_with_marks_is_trained_evaluated_and_frozen(self):
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

            def forward(self, x: Tensor) -> Tensor:
                for layer in self.layers:
                    with CheckpointScope("layer", use_recomputation=False):
                        x = keep(adaptive_checkpoint(checkpoint(layer(x).tanh()), 8))
                return x

        net, x = Net(), torch.randn(2, 4)
        trained = net(x)
        trained.sum().backward()
        net.eval()
        with torch.no_grad():
            assert torch.equal(net(x), trained)
        with torch.inference_mode():
            assert torch.equal(net(x), trained)
        net.requires_grad_(False)
        assert torch.equal(net(x), trained)

    def test_a_tensor_from_outside_the_scope_is_left_to_it(self):
        x = torch.randn(8, requires_grad=True)
        outside = x.exp()
        with CheckpointScope("block") as scope:
            y = recompute(outside).sin().sin()
        assert scope.memory_bytes == outside.nbytes
        y.sum().backward()


class TestAdaptive:
    def is_held(self, shape, threshold):
        """Whether a saved tensor of this shape is held until backward."""
        x = torch.ones(shape, requires_grad=True)
        with CheckpointScope("block", use_recomputation=False):
            y = x * 2
            assert adaptive_checkpoint(y, threshold) is y
            memory = Memory(y)
            z = y.sin()
            del y
        held = not memory.is_freed
        z.sum().backward()
        expected = 2 * torch.cos(torch.full(shape, 2.0))
        assert torch.equal(x.grad, expected)
        return held

    def test_a_tensor_is_dropped_if_it_is_larger_than_the_threshold(self):
        assert not self.is_held((128, 128), 10 * KIBIBYTE)
        assert self.is_held((2, 2), 10 * KIBIBYTE)

    def test_a_tensor_of_exactly_the_threshold_is_kept(self):
        assert self.is_held((256,), KIBIBYTE)
        assert not self.is_held((257,), KIBIBYTE)

    def test_a_small_tensor_needs_neither_scope_nor_graph(self):
        small = torch.ones(2, 2)
        assert adaptive_checkpoint(small, 10 * KIBIBYTE) is small

    @pytest.mark.parametrize("threshold", [-1, 1.5, "10KB", None, True])
    def test_a_threshold_that_is_no_number_of_bytes_is_refused(self, threshold):
        with pytest.raises(UsageError, match="threshold in bytes"):
            adaptive_checkpoint(leaf(), threshold)

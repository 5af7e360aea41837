"""The manager: which scopes there are, and what their regions hold."""

# Torch types what a module holds as Tensor | Module, and a gradient as maybe None.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import sys
import threading
from typing import Any

import pytest
import torch

from recoup import (
    CheckpointGroup,
    CheckpointManager,
    CheckpointScope,
    checkpoint,
    checkpoint_module,
)
from recoup.checkpointing import CheckpointNode
from recoup.errors import ClearedError, UsageError
from tests.support.steps import Block, Mlp
from tests.support.watching import Memory, saved_bytes

MEBIBYTE = 1 << 20


def leaf(count: int = 10) -> Any:
    return torch.linspace(-1, 1, count, requires_grad=True)


class TestOptions:
    def test_the_defaults_are_those_of_the_seed(self):
        manager = CheckpointManager()
        assert manager.max_memory_mb == 1024
        assert manager.auto_checkpoint is False
        assert manager.memory_threshold == 0.8

    def test_options_can_be_given_and_set(self):
        manager = CheckpointManager(max_memory_mb=64, memory_threshold=1)
        manager.max_memory_mb = 128
        manager.memory_threshold = 0.5
        manager.auto_checkpoint = True
        assert (manager.max_memory_mb, manager.memory_threshold) == (128, 0.5)
        assert manager.auto_checkpoint is True

    @pytest.mark.parametrize("mebibytes", [0, -1, 1.5, "64", None, True])
    def test_a_budget_that_is_no_number_of_mebibytes_is_refused(self, mebibytes):
        with pytest.raises(UsageError, match="max_memory_mb"):
            CheckpointManager(max_memory_mb=mebibytes)
        manager = CheckpointManager()
        with pytest.raises(UsageError, match="max_memory_mb"):
            manager.max_memory_mb = mebibytes
        assert manager.max_memory_mb == 1024

    @pytest.mark.parametrize("share", [0, -0.1, 1.1, float("nan"), "0.8", None, True])
    def test_a_threshold_outside_its_range_is_refused_not_clamped(self, share):
        with pytest.raises(UsageError, match="memory_threshold"):
            CheckpointManager(memory_threshold=share)

    def test_the_switch_is_true_or_false(self):
        with pytest.raises(UsageError, match="auto_checkpoint"):
            CheckpointManager(auto_checkpoint="yes")


class TestWithoutChoosing:
    def test_without_the_switch_it_chooses_nothing(self):
        manager = CheckpointManager()
        nodes = [CheckpointNode(operation=name) for name in "ab"]
        nodes[0].is_checkpoint = True
        assert not manager.should_checkpoint(nodes[0])
        manager.selective_checkpointing(nodes)
        assert [node.is_checkpoint for node in nodes] == [False, False]

    def test_a_question_about_something_else_is_a_type_error(self):
        wrong: Any = torch.ones(1)
        with pytest.raises(TypeError, match="CheckpointNode, got Tensor"):
            CheckpointManager().should_checkpoint(wrong)


class TestRegistration:
    def test_a_scope_is_registered_once(self):
        manager, scope = CheckpointManager(), CheckpointScope("block")
        manager.register_scope(scope)
        manager.register_scope(scope)
        assert manager.scopes == (scope,)
        manager.unregister_scope(scope)
        assert manager.scopes == ()

    def test_two_scopes_of_one_name_are_two(self):
        manager = CheckpointManager()
        for _ in range(2):
            manager.register_scope(CheckpointScope("same"))
        assert len(manager.scopes) == 2

    def test_an_unknown_scope_cannot_be_unregistered(self):
        with pytest.raises(
            UsageError, match="expected a registered scope, got 'block'"
        ):
            CheckpointManager().unregister_scope(CheckpointScope("block"))

    @pytest.mark.parametrize("scope", [None, "block"])
    def test_only_scopes_are_registered(self, scope):
        with pytest.raises(TypeError, match="expected a CheckpointScope, got"):
            CheckpointManager().register_scope(scope)
        with pytest.raises(TypeError, match="expected a CheckpointScope, got"):
            CheckpointManager().unregister_scope(scope)

    def test_a_registered_scope_is_accounted_for(self):
        manager, scope = CheckpointManager(), CheckpointScope("block")
        x, y = leaf(100), leaf(1000)
        with scope:
            before = x.exp().sin()
        manager.register_scope(scope)
        with scope:
            after = y.exp().sin()
        assert manager.total_memory_bytes() == x.nbytes + y.nbytes
        manager.unregister_scope(scope)
        assert (manager.total_memory_bytes(), manager.nodes) == (0, [])
        del before, after


@pytest.fixture
def hasty_threads():
    """Let threads take turns so often that they meet in the middle of everything."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class TestAccounting:
    def test_everything_inside_the_block_is_accounted_for(self):
        manager = CheckpointManager()
        module = checkpoint_module(Mlp(10), name="module")
        group = CheckpointGroup("group")
        with manager:
            with CheckpointScope("scope"):
                y = leaf().exp().sin()
            y = checkpoint(lambda t: t.cos().tanh(), y)
            y = group.checkpoint_fn(y, lambda t: t.exp().sin())
            y = module(y)
        with CheckpointScope("outside"):
            y = y.exp().sin()
        names = [node.name for node in manager.nodes]
        assert [names[0], *names[2:]] == ["scope", "group", "module"]
        assert "lambda" in names[1]

    def test_a_compiled_function_is_accounted_for(self):
        function = torch.compile(lambda t: t.exp().sin(), backend="eager")
        manager = CheckpointManager()
        x = leaf(1000)
        with manager:
            y = checkpoint(function, x)
        assert len(manager.nodes) == 1
        assert manager.total_memory_bytes() == x.nbytes
        y.sum().backward()
        assert manager.total_memory_bytes() == 0

    def test_bytes_are_those_of_an_independent_counter(self):
        manager = CheckpointManager()
        blocks = [Block() for _ in range(3)]

        def forward():
            x = torch.randn(2, 8, 16)
            for index, block in enumerate(blocks):
                with CheckpointScope(f"block{index}"):
                    x = block(x)
            return x

        with manager:
            out = forward()
        assert manager.total_memory_bytes() == saved_bytes(forward)
        assert manager.current_memory_mb == saved_bytes(forward) / MEBIBYTE
        del out
        assert manager.total_memory_bytes() == 0

    def test_a_name_gathers_all_its_regions(self):
        manager = CheckpointManager()
        x, y = leaf(100), leaf(1000)
        with manager:
            outputs = []
            for name, tensor in [("a", x), ("b", x), ("a", y), ("b", x)]:
                with CheckpointScope(name):
                    outputs.append(tensor.exp().sin())
        assert manager.scope_memory_bytes("a") == x.nbytes + y.nbytes
        assert manager.scope_memory_bytes("b") == x.nbytes
        assert manager.scope_memory_bytes("c") == 0
        assert manager.total_memory_bytes() == x.nbytes + y.nbytes

    def test_a_scope_registered_and_run_inside_counts_once(self):
        manager, scope = CheckpointManager(), CheckpointScope("block")
        manager.register_scope(scope)
        with manager, scope:
            y = leaf().exp().sin()
        assert len(manager.nodes) == 1
        del y
        assert manager.nodes == []

    def test_counting_does_not_mind_a_changed_parameter(self):
        manager = CheckpointManager()
        weight = leaf()
        with manager, CheckpointScope("block"):
            y, unused = (weight * 2).sin(), (weight * weight).cos()
        y.sum().backward()
        with torch.no_grad():
            weight.sub_(weight.grad)
        assert manager.total_memory_bytes() == weight.nbytes
        assert manager.scope_memory_bytes("block") == weight.nbytes
        del unused

    def test_managers_nest_and_do_not_disturb_each_other(self):
        outer, inner = CheckpointManager(), CheckpointManager()
        with outer:
            with CheckpointScope("first"):
                y = leaf().exp().sin()
            with inner, CheckpointScope("second"):
                y = y.exp().sin()
        assert [node.name for node in outer.nodes] == ["first", "second"]
        assert [node.name for node in inner.nodes] == ["second"]

    def test_an_exception_ends_the_accounting(self):
        manager = CheckpointManager()
        with pytest.raises(KeyError), manager:
            raise KeyError("on purpose")
        with CheckpointScope("after"):
            y = leaf().exp().sin()
        assert manager.nodes == []
        del y

    def test_regions_of_all_threads_are_accounted_for(self, hasty_threads):
        manager, outputs, start = CheckpointManager(), [], threading.Barrier(4)

        def work():
            start.wait()
            for _ in range(100):
                with CheckpointScope("thread"):
                    outputs.append(leaf().exp().sin())

        threads = [threading.Thread(target=work) for _ in range(4)]
        with manager:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(manager.nodes) == 400


class TestClearing:
    def test_clearing_frees_everything_at_once(self):
        manager = CheckpointManager()
        outside = leaf(1000) * 2
        memory = Memory(outside)
        with manager:
            with CheckpointScope("first"):
                y = outside.exp().sin()
            with CheckpointScope("second", use_recomputation=False):
                z = y.exp().sin()
        del outside
        manager.clear_all_checkpoints()
        assert memory.is_freed
        assert (manager.total_memory_bytes(), manager.scope_memory_bytes("first")) == (
            0,
            0,
        )
        with pytest.raises(ClearedError, match="second"):
            z.sum().backward()

    def test_registered_scopes_stay_registered(self):
        manager, scope = CheckpointManager(), CheckpointScope("block")
        manager.register_scope(scope)
        manager.clear_all_checkpoints()
        assert manager.scopes == (scope,)
        x = leaf()
        with scope:
            y = x.exp().sin()
        assert manager.total_memory_bytes() == x.nbytes
        del y

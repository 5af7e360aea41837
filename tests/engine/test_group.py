"""Groups: several calls that are recorded together and replayed together."""

# Torch types what a module holds as Tensor | Module, and a gradient as maybe None.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import weakref
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from recoup import CheckpointGroup, CheckpointScope, keep
from recoup.errors import UnsupportedError, UsageError
from tests.support.steps import Block, gradient, problems, step_differences
from tests.support.twin import leftovers
from tests.support.watching import Memory, Replayed, saved_bytes

PROBLEMS = problems()
Pair = namedtuple("Pair", ["left", "right"])
FLEX = {
    1: CheckpointGroup.checkpoint_fn_flex,
    2: CheckpointGroup.checkpoint_fn_flex2,
    3: CheckpointGroup.checkpoint_fn_flex3,
}


@dataclass
class Both:
    left: torch.Tensor
    right: torch.Tensor


def leaf(count: int = 10) -> Any:
    return torch.linspace(-1, 1, count, requires_grad=True)


class TestCalls:
    @pytest.mark.parametrize("name", PROBLEMS)
    def test_a_step_in_a_group_leaves_what_the_plain_step_leaves(self, name):
        def call(model, x):
            return CheckpointGroup().checkpoint_fn(x, model)

        model, x = PROBLEMS[name]
        assert step_differences(model, call, x) == []

    @pytest.mark.parametrize(
        "make",
        [
            lambda a, b: (a, b),
            lambda a, b: [a, b],
            lambda a, b: {"left": a, "right": b, "none": None, "text": "text"},
            Pair,
            Both,
            lambda a, b: ((a, None), [{"deep": b}, 3]),
        ],
        ids=["tuple", "list", "dict", "namedtuple", "dataclass", "nested"],
    )
    def test_any_structure_goes_in_and_comes_out(self, make):
        def found(tree):
            """The tensors of a structure, a dataclass too, in order."""
            if isinstance(tree, Both):
                return [tree.left, tree.right]
            if isinstance(tree, dict):
                tree = list(tree.values())
            if isinstance(tree, (list, tuple)):
                return [tensor for branch in tree for tensor in found(branch)]
            return [tree] if isinstance(tree, torch.Tensor) else []

        def forward(call):
            inputs = make(leaf(), leaf())
            outputs = call(
                inputs, lambda given: make(*(t.exp().sin() for t in found(given)))
            )
            assert type(outputs) is type(inputs)
            first, second = found(outputs)
            (first * second.tanh()).sum().backward()
            return [tensor.grad for tensor in found(inputs)]

        plain = forward(lambda inputs, function: function(inputs))
        ours = forward(CheckpointGroup().checkpoint_fn)
        for found_gradient, expected in zip(ours, plain, strict=True):
            assert torch.equal(found_gradient, expected)

    @pytest.mark.parametrize("arity", FLEX)
    def test_a_flexible_call_checks_how_many_tensors_come_out(self, arity):
        group = CheckpointGroup()
        inputs = [leaf(), leaf()]
        outputs = FLEX[arity](
            group, inputs, lambda t: [(t[0] * t[1]).sin() for _ in range(arity)]
        )
        total = outputs if arity == 1 else sum(outputs)
        total.sum().backward()
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        for wrong in {1, 2, 3, 4} - {arity}:
            with pytest.raises(
                UsageError, match=f"must return {arity} tensor.*returned {wrong}"
            ):
                FLEX[arity](group, inputs, lambda t, n=wrong: [t[0]] * n)

    def test_a_single_tensor_is_one_output(self):
        y = CheckpointGroup().checkpoint_fn_flex([leaf()], lambda t: t[0].exp())
        assert isinstance(y, torch.Tensor)

    def test_an_output_that_is_no_tensor_is_named(self):
        with pytest.raises(UsageError, match="Tensor, str"):
            CheckpointGroup().checkpoint_fn_flex2([leaf()], lambda t: (t[0], "text"))

    @pytest.mark.parametrize("inputs", [torch.ones(2), {"a": torch.ones(2)}, None])
    def test_a_flexible_call_takes_a_list_of_tensors(self, inputs):
        with pytest.raises(UsageError, match="expected a list of tensors"):
            CheckpointGroup().checkpoint_fn_flex(inputs, lambda t: t)

    def test_what_is_no_function_is_refused(self):
        with pytest.raises(UsageError, match="expected a function to call, got int"):
            CheckpointGroup().checkpoint_fn(leaf(), 3)

    @pytest.mark.parametrize("name", ["", " ", None])
    def test_a_name_that_says_nothing_is_refused(self, name):
        with pytest.raises(UsageError, match="expected a name for the group"):
            CheckpointGroup(name)

    def test_first_and_second_derivatives_are_right(self):
        def function(x):
            group = CheckpointGroup()
            y = group.checkpoint_fn(x, lambda t: t.sin())
            return group.checkpoint_fn(y, lambda t: t.exp() * t)

        x = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(function, x)
        assert torch.autograd.gradgradcheck(function, x)

    def test_torch_func_inside_says_what_to_do(self):
        with pytest.raises(UnsupportedError, match=r"torch\.autograd\.grad"):
            CheckpointGroup().checkpoint_fn(
                leaf(), lambda x: torch.func.grad(lambda t: t.sin().sum())(x)
            )
        assert list(leftovers()) == []


class TestSharing:
    def test_what_several_calls_share_is_replayed_once(self):
        group = CheckpointGroup()
        x = leaf()
        shared = group.checkpoint_fn(x, torch.exp)
        first = group.checkpoint_fn(shared, lambda t: t.sin().tanh())
        second = group.checkpoint_fn(shared, lambda t: t.cos().tanh())
        with Replayed() as replayed:
            (first * second).sum().backward(retain_graph=True)
        assert replayed.operators["exp"] == 1
        assert (group.call_count, group.replay_count) == (3, 3)
        twin = leaf()
        shared = twin.exp()
        (shared.sin().tanh() * shared.cos().tanh()).sum().backward()
        assert torch.equal(x.grad, twin.grad)

    def test_what_several_calls_take_in_is_held_once(self):
        group = CheckpointGroup()
        x = leaf(1000)
        outputs = [
            group.checkpoint_fn(x, lambda t, n=n: (t * n).exp().sin()) for n in range(3)
        ]
        assert group.memory_bytes == x.nbytes
        assert len(group.nodes) == 3
        sum(outputs).sum().backward()
        assert group.memory_bytes == 0

    def test_all_outputs_of_a_call_are_served_by_one_replay(self):
        group = CheckpointGroup()
        first, second = group.checkpoint_fn_flex2(
            [leaf()], lambda t: (t[0].exp().sin(), t[0].cos().tanh())
        )
        with Replayed() as replayed:
            first.sum().backward(retain_graph=True)
        assert group.replay_count == 1
        with Replayed() as replayed:
            (first + second).sum().backward(retain_graph=True)
        assert group.replay_count == 2
        assert dict(replayed.operators) == {"exp": 1, "cos": 1, "tanh": 1}

    def test_calls_in_a_row_leave_what_the_plain_step_leaves(self):
        def call(model, x):
            group = CheckpointGroup()
            for block in model:
                x = group.checkpoint_fn(x, block)
            return x

        model, x = nn.Sequential(Block(), Block()), torch.randn(2, 8, 16)
        assert step_differences(model, call, x) == []

    def test_one_group_serves_many_steps(self):
        group = CheckpointGroup("steps")

        def function(x):
            y = group.checkpoint_fn(x, lambda t: t.exp().sin())
            return group.checkpoint_fn(y, lambda t: t.cos().tanh())

        expected = gradient(lambda x: x.exp().sin().cos().tanh(), leaf())
        for _ in range(3):
            assert torch.equal(gradient(function, leaf()), expected)
        assert group.call_count == 6

    def test_two_graphs_of_one_group_may_be_alive(self):
        group = CheckpointGroup()
        x = leaf()
        first = group.checkpoint_fn(x, lambda t: t.exp().sin())
        first.sum().backward(retain_graph=True)
        second = group.checkpoint_fn(x, lambda t: t.cos().tanh())
        assert len(group.nodes) == 2
        x.grad = None
        (first + second).sum().backward()
        twin = leaf()
        (twin.exp().sin() + twin.cos().tanh()).sum().backward()
        assert torch.equal(x.grad, twin.grad)

    def test_groups_do_not_share(self):
        one, other = CheckpointGroup("one"), CheckpointGroup("other")
        x = leaf()
        y = other.checkpoint_fn(
            one.checkpoint_fn(x, torch.exp), lambda t: t.sin().tanh()
        )
        y.sum().backward()
        twin = leaf()
        twin.exp().sin().tanh().sum().backward()
        assert torch.equal(x.grad, twin.grad)
        assert (one.call_count, other.call_count) == (1, 1)

    def test_without_gradients_a_call_is_plain(self):
        group = CheckpointGroup()
        with torch.no_grad():
            group.checkpoint_fn(leaf(), torch.exp)
        assert (group.call_count, group.nodes, group.memory_bytes) == (1, [], 0)


class TestMemory:
    @pytest.mark.parametrize("backward", [True, False])
    def test_a_finished_graph_frees_everything(self, backward):
        group = CheckpointGroup()
        outside = leaf(1000) * 2
        memory = Memory(outside)
        y = group.checkpoint_fn(outside, lambda t: t.exp().sin()).sum()
        del outside
        assert not memory.is_freed
        if backward:
            y.backward()
        del y
        assert memory.is_freed
        assert (group.nodes, group.memory_bytes) == ([], 0)

    def test_a_group_dies_without_the_collector(self):
        group = CheckpointGroup()
        y = group.checkpoint_fn(leaf(), lambda t: t.exp().sin())
        reference = weakref.ref(group)
        del group
        assert reference() is None
        y.sum().backward()

    def test_an_exception_leaves_nothing_behind(self):
        group = CheckpointGroup()
        outside = leaf(1000) * 2
        memory = Memory(outside)

        def fail(x):
            x.exp().sin()
            raise KeyError("on purpose")

        with pytest.raises(KeyError, match="on purpose"):
            group.checkpoint_fn(outside, fail)
        assert list(leftovers()) == []
        del outside
        assert memory.is_freed
        expected = gradient(torch.exp, leaf())
        found = gradient(lambda x: group.checkpoint_fn(x, torch.exp), leaf())
        assert torch.equal(found, expected)

    def test_a_scope_around_a_group_drops_what_the_group_would_hold(self):
        group = CheckpointGroup()
        x = leaf(1000)
        with CheckpointScope("outer"):
            middle = x.exp()
            memory = Memory(middle)
            y = group.checkpoint_fn(middle, lambda t: t.sin().tanh())
            del middle
            z = y.cos()
        del y
        assert memory.is_freed
        z.sum().backward()
        twin = leaf(1000)
        twin.exp().sin().tanh().cos().sum().backward()
        assert torch.equal(x.grad, twin.grad)

    def test_a_scope_inside_a_group_gives_right_gradients(self):
        def inside(t):
            with CheckpointScope("inner"):
                return t.exp().sin().tanh()

        found = gradient(lambda x: CheckpointGroup().checkpoint_fn(x, inside), leaf())
        assert torch.equal(found, gradient(lambda x: x.exp().sin().tanh(), leaf()))

    def test_hooks_around_a_group_get_what_it_holds(self):
        x = leaf(1000)
        held = saved_bytes(
            lambda: CheckpointGroup().checkpoint_fn(x, lambda t: t.exp().sin())
        )
        assert held == x.nbytes

    def test_a_kept_tensor_that_nobody_needs_is_not_held(self):
        x = leaf(1000)

        def function(t):
            useless = keep(t + 1)
            memories.append(Memory(useless))
            return useless.sum() + t.exp().sum()

        memories = []
        y = CheckpointGroup().checkpoint_fn(x, function)
        assert memories[0].is_freed
        y.backward()

"""Nodes: one region, or one hand-made checkpoint, to look at."""

# Torch types what a module holds as Tensor | Module, and a gradient as maybe None.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import weakref
from typing import Any

import pytest
import torch

from recoup import CheckpointScope
from recoup.checkpointing import CheckpointNode
from recoup.errors import ChangedTensorError, ClearedError, UsageError
from tests.support.watching import Memory


def leaf(count: int = 10) -> Any:
    return torch.linspace(-1, 1, count, requires_grad=True)


@pytest.fixture
def region_node():
    """The node of a scope that holds its input, with the input and the output."""
    x = leaf()
    scope = CheckpointScope("block")
    with scope:
        y = x.exp().sin().tanh()
    (node,) = scope.nodes
    return node, x, y


class TestHandMade:
    def test_a_new_node_is_empty(self):
        node = CheckpointNode(operation="double")
        assert (node.name, node.operation, node.output) == ("double", "double", None)
        assert (node.saved_activations, node.recompute_functions) == ([], [])
        assert not node.is_checkpoint
        assert (node.is_alive, node.replay_count, node.children) == (True, 0, ())

    def test_a_node_knows_its_output_and_children_but_keeps_no_tensor_alive(self):
        output = torch.ones(3)
        child = CheckpointNode(operation="input")
        node = CheckpointNode(output, "sum", child)
        assert node.output is output
        assert node.children == (child,)
        del output
        assert node.output is None

    def test_saving_is_by_reference_in_order_and_once(self):
        first, second = torch.ones(3), torch.zeros(2)
        node = CheckpointNode()
        node.save_activations(first)
        node.save_activations(second, first)
        addresses = [tensor.data_ptr() for tensor in node.saved_activations]
        assert addresses == [first.data_ptr(), second.data_ptr()]
        assert node.is_checkpoint

    def test_saving_nothing_makes_no_checkpoint(self):
        node = CheckpointNode()
        node.save_activations()
        assert not node.is_checkpoint

    def test_a_change_in_place_is_noticed(self):
        tensor = torch.ones(3, 4)
        node = CheckpointNode()
        node.save_activations(tensor)
        tensor.add_(1)
        with pytest.raises(ChangedTensorError, match=r"\(3, 4\)"):
            _ = node.saved_activations

    def test_only_tensors_are_saved(self):
        wrong: Any = [torch.ones(2)]
        with pytest.raises(UsageError, match="expected tensors to save, got list"):
            CheckpointNode().save_activations(wrong)

    def test_functions_run_in_the_order_they_were_added(self):
        order = []
        node = CheckpointNode()
        for name in "abc":
            node.add_recompute_function(
                lambda name=name: (order.append(name), torch.full((1,), ord(name)))[1]
            )
        results = node.recompute()
        assert order == ["a", "b", "c"]
        assert [int(result) for result in results] == [97, 98, 99]
        assert len(node.recompute_functions) == 3

    def test_a_function_may_return_several_tensors(self):
        node = CheckpointNode()
        node.add_recompute_function(lambda: [torch.ones(1), torch.zeros(1)])
        node.add_recompute_function(lambda: torch.ones(2))
        assert [tuple(result.shape) for result in node.recompute()] == [
            (1,),
            (1,),
            (2,),
        ]

    def test_results_are_served_again_while_they_live(self):
        calls = []
        node = CheckpointNode()
        node.add_recompute_function(lambda: (calls.append(1), torch.ones(3))[1])
        first = node.recompute()
        assert node.recompute()[0] is first[0]
        assert len(calls) == 1
        del first
        node.recompute()
        assert len(calls) == 2

    def test_a_function_added_later_is_run_too(self):
        node = CheckpointNode()
        node.add_recompute_function(lambda: torch.ones(1))
        first = node.recompute()
        node.add_recompute_function(lambda: torch.ones(2))
        assert len(node.recompute()) == 2
        del first

    def test_without_a_function_there_is_nothing_to_recompute(self):
        with pytest.raises(UsageError, match="'double' has nothing to recompute with"):
            CheckpointNode(operation="double").recompute()

    def test_a_function_must_be_callable(self):
        wrong: Any = 3
        with pytest.raises(
            UsageError, match="expected a callable recompute function, got 3"
        ):
            CheckpointNode().add_recompute_function(wrong)

    def test_clearing_frees_at_once(self):
        tensor = torch.ones(1000)
        memory = Memory(tensor)
        node = CheckpointNode()
        node.save_activations(tensor)
        del tensor
        assert not memory.is_freed
        node.clear_saved_activations()
        assert memory.is_freed
        assert node.saved_activations == []
        node.clear_saved_activations()


class TestRegions:
    def test_a_node_shows_its_region(self, region_node):
        node, x, _ = region_node
        assert (node.name, node.is_checkpoint, node.is_alive) == ("block", True, True)
        assert [t.data_ptr() for t in node.saved_activations] == [x.data_ptr()]
        assert len(node.recompute_functions) == 1

    def test_every_tensor_is_listed_once(self):
        layer = torch.nn.Linear(4, 8)
        x = torch.randn(2, 4, requires_grad=True)
        scope = CheckpointScope("block")
        with scope:
            y = layer(x).tanh()
        held = [
            t.untyped_storage().data_ptr() for t in scope.nodes[0].saved_activations
        ]
        assert sorted(held) == sorted(
            t.data_ptr() for t in (x, layer.weight, layer.bias)
        )
        del y

    def test_it_recomputes_what_the_region_forgot(self, region_node):
        node, x, y = region_node
        found = sorted(float(tensor.sum()) for tensor in node.recompute())
        x, y = x.detach(), y.detach()
        # Saved are exp's result and tanh's.
        assert found == sorted([float(x.exp().sum()), float(y.sum())])
        assert node.replay_count == 1

    def test_recomputed_values_are_served_again_while_they_live(self, region_node):
        node, _, _ = region_node
        first = node.recompute()
        assert node.recompute()[0] is first[0]
        assert node.replay_count == 1
        del first
        node.recompute()
        assert node.replay_count == 2

    def test_looking_changes_no_gradient(self, region_node):
        node, x, y = region_node
        node.recompute()
        _ = node.saved_activations
        y.sum().backward()
        twin = leaf()
        twin.exp().sin().tanh().sum().backward()
        assert torch.equal(x.grad, twin.grad)

    def test_a_node_does_not_keep_its_region_alive(self):
        outside = leaf(1000) * 2
        memory = Memory(outside)
        scope = CheckpointScope("block")
        with scope:
            y = outside.exp().sin()
        (node,) = scope.nodes
        del outside, y
        assert memory.is_freed
        assert not node.is_alive
        assert (node.region, node.saved_activations, node.replay_count) == (None, [], 0)
        with pytest.raises(UsageError, match="nothing to recompute"):
            node.recompute()

    def test_it_counts_replays(self, region_node):
        node, _, y = region_node
        for count in (1, 2, 3):
            y.sum().backward(retain_graph=True)
            assert node.replay_count == count

    def test_clearing_a_region_frees_at_once_and_backward_says_so(self):
        outside = leaf(1000) * 2
        memory = Memory(outside)
        scope = CheckpointScope("block")
        with scope:
            y = outside.exp().sin()
        del outside
        (node,) = scope.nodes
        node.clear_saved_activations()
        assert memory.is_freed
        assert node.saved_activations == []
        with pytest.raises(ClearedError, match=r"'block'.*cleared"):
            node.recompute()
        with pytest.raises(ClearedError, match=r"'block'.*cleared"):
            y.sum().backward()

    def test_clearing_frees_kept_activations_too(self):
        scope = CheckpointScope("block", use_recomputation=False)
        with scope:
            inner = leaf(1000).exp()
            memory = Memory(inner)
            y = inner.sin()
            del inner
        assert not memory.is_freed
        scope.nodes[0].clear_saved_activations()
        assert memory.is_freed
        with pytest.raises(ClearedError):
            y.sum().backward()

    def test_a_changed_input_is_noticed(self, region_node):
        node, x, _ = region_node
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(ChangedTensorError, match=r"\(10,\)"):
            _ = node.saved_activations

    def test_functions_may_be_added_to_a_regions_node(self, region_node):
        node, _, _ = region_node
        node.add_recompute_function(lambda: torch.full((1,), 7.0))
        assert float(node.recompute()[-1]) == 7.0

    def test_a_node_dies_without_the_collector(self, region_node):
        node, _, _ = region_node
        node.recompute()
        own = CheckpointNode(region=node.region)
        own.recompute()
        reference = weakref.ref(own)
        del own
        assert reference() is None

"""Batch normalisation in training that backward can recompute.

It reads the running statistics only to update them. Its result does not depend on them,
so backward, where they have new values, can recompute it without them.
"""

import operator
from typing import Any

import torch
from torch import fx

_FORWARD = torch.ops.aten._native_batch_norm_legit_functional.default
_AGAIN = torch.ops.aten._native_batch_norm_legit.no_stats
_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
_RESULTS = 3
"""The result, mean and deviation come first; the new running statistics follow."""


def normalises_batch(node: fx.Node) -> bool:
    """Return whether a node normalises by the statistics of the batch."""
    return node.target is _FORWARD and node.args[5] is True


def forget_running_statistics(joint: fx.Graph) -> None:
    """Remove the running statistics from the inputs of batch norm's backward."""
    for node in joint.nodes:
        if node.target is _BACKWARD and node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])


def normalise_again(
    forward: fx.GraphModule, backward: fx.GraphModule, forward_outputs: int
) -> None:
    """Make backward recompute batch norm without, and forward not save, the statistics.

    Args:
        forward: The forward half of a joint graph.
        backward: The backward half.
        forward_outputs: The number of forward's outputs before the saved values.
    """
    graph = backward.graph
    statistics: set[fx.Node] = set()
    for node in graph.find_nodes(op="call_function", target=_FORWARD):
        if not normalises_batch(node):
            continue
        value, weight, bias, *running, training, momentum, epsilon = node.args
        with graph.inserting_before(node):
            again = graph.call_function(
                _AGAIN, (value, weight, bias, training, momentum, epsilon)
            )
        again.meta = {**node.meta, "val": node.meta["val"][:_RESULTS]}
        for item in list(node.users):
            assert item.target is operator.getitem, "it returns several results"
            item.args = (again, item.args[1])
            if item.args[1] >= _RESULTS:
                graph.erase_node(item)
        graph.erase_node(node)
        statistics.update(each for each in running if isinstance(each, fx.Node))
    unused = {n.name for n in statistics if not n.users and n.op == "placeholder"}
    if not unused:
        return
    for node in statistics:
        if node.name in unused:
            graph.erase_node(node)
    _drop_saved(forward.graph, unused, forward_outputs)
    forward.recompile()
    backward.recompile()


def _drop_saved(forward: fx.Graph, names: set[str], forward_outputs: int) -> None:
    output = forward.output_node()
    found: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    kept = [
        place
        for place, node in enumerate(found)
        if place < forward_outputs or getattr(node, "name", "") not in names
    ]
    output.args = (tuple(found[place] for place in kept),)
    described = output.meta.get("desc")
    if described is not None:
        output.meta["desc"] = [described[place] for place in kept]

"""Predict the memory of a partition from its two graphs, without compiling them."""

import operator
from collections.abc import Iterable

from torch import Tensor, fx

from recoup.backend.compiler.joint_graphs import is_view


def split_peaks(
    forward: fx.Graph, backward: fx.Graph, *, fuses: bool
) -> tuple[int, int]:
    """Return the peaks of forward and backward above the bytes in use at their start.

    Operators run in the order of the graphs, and a value is released after its last
    use. Inputs of the block stay in use; what was saved for backward is released too.

    Args:
        forward: The forward graph.
        backward: The backward graph.
        fuses: Whether operators are fused: what only fused operators read is not
            written to memory then.
    """
    inputs = {node.name for node in forward.nodes if node.op == "placeholder"}
    saved = [
        node
        for node in backward.nodes
        if node.op == "placeholder" and node.name not in inputs
    ]
    return _peak(forward, (), fuses=fuses), _peak(backward, saved, fuses=fuses)


def _peak(graph: fx.Graph, released: Iterable[fx.Node], *, fuses: bool) -> int:
    owner: dict[fx.Node, fx.Node] = {}
    last_use: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        is_part = is_view(node) or node.target is operator.getitem
        source = node.args[0] if is_part else None
        owner[node] = owner[source] if isinstance(source, fx.Node) else node
        for read in node.all_input_nodes:
            last_use[owner[read]] = node
    ends: dict[fx.Node, list[fx.Node]] = {}
    for value, node in last_use.items():
        ends.setdefault(node, []).append(value)
    counted = dict.fromkeys(released, True)
    live = peak = 0
    for node in graph.nodes:
        if node.op == "call_function" and owner[node] is node:
            counted[node] = not (fuses and _is_fused_away(node))
            live += _bytes(node) if counted[node] else 0
            peak = max(peak, live)
        for value in ends.get(node, ()):
            live -= _bytes(value) if counted.get(value) else 0
    return peak


def _is_fused_away(node: fx.Node) -> bool:
    from torch._functorch import partitioners

    fusible = partitioners.get_default_op_list().is_fusible
    return fusible(node) and all(
        user.op == "call_function" and fusible(user) for user in node.users
    )


def _bytes(node: fx.Node) -> int:
    found = node.meta.get("val")
    parts = found if isinstance(found, list | tuple) else (found,)
    return sum(
        int(part.numel()) * part.dtype.itemsize
        for part in parts
        if isinstance(part, Tensor)
    )

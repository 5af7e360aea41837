"""Captures: the tensors a step uses without being given them, found and verified.

They are searched where Python keeps them (closures, defaults, bound objects, modules,
named globals, containers), and every tape is walked: an edge that leads to a tensor
that was not found is an error, because its gradient would be lost.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from recoup.backend.autograd.saved_tensors import has_hooks
from recoup.backend.state.trees import map_leaves
from recoup.backend.state.walk import reach
from recoup.errors import CaptureError
from recoup.loops.steps import Step

Edge = tuple[Node, int]


def captured_tensors(function: Any) -> list[Tensor]:
    """Return the tensors that require gradients and that a function can see.

    Costs some microseconds for each object on the way.

    Examples:
        >>> import torch
        >>> weight = torch.ones(2, requires_grad=True)
        >>> step = lambda state: state * weight
        >>> captured_tensors(step)[0] is weight
        True
    """
    return [tensor for tensor in reach(function, kind=Tensor) if tensor.requires_grad]


def captured_by(step: Step, leaves: Sequence[Any]) -> list[Tensor]:
    """Return what a step captures, parts of state and inputs that are objects included.

    Args:
        step: What to look at.
        leaves: The leaves of a state.
    """
    fed = [] if step.feed is None else step.feed.leaves
    objects = [leaf for leaf in [*leaves, *fed] if not isinstance(leaf, Tensor)]
    return captured_tensors([step.function, *objects])


class Captures:
    """The captured tensors of one loop.

    Args:
        tensors: What was found or named, without repetition.

    Attributes:
        tensors: The tensors themselves; gradients go there.
        sources: What the tapes use in their place: the tensors themselves, unless
            one of them was computed from another or has a hook. Then twins without a
            graph, or else a gradient would pass from the one to the other on the tape
            and again behind it, and the hook would be called for every tape.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self._replaced: dict[int, Tensor] = {}
        self.sources = self.tensors
        hooked = any(map(has_hooks, self.tensors))
        if hooked or _depend_on_each_other(self.tensors):
            self.sources = [tensor.detach().requires_grad_() for tensor in self.tensors]
            self._replaced = {
                id(tensor): twin
                for tensor, twin in zip(self.tensors, self.sources, strict=True)
            }
        edges = {_edge_of(source) for source in self.sources}
        # A leaf's node has one way in; a node that computes may have others, unknown.
        ends = {node for node, _ in edges if not node.next_functions}
        self._ends: set[Node | None] = {None, *ends}
        self._computed = {edge for edge in edges if edge[0] not in ends}

    def replaced(self) -> AbstractContextManager[Any]:
        """Return a context in which operators see the sources, if they are others."""
        return _Replacing(self._replaced)

    def stray(self, results: Iterable[Any], given: Iterable[Tensor]) -> Tensor | None:
        """Return a tensor that a tape uses and that was neither given nor captured.

        Every node of the tape is looked at, because any step may be the first to use
        such a tensor. Costs about half a microsecond for each.

        Args:
            results: What the taped steps returned.
            given: The tensors they were given that require gradients, all leaves.

        Returns:
            The tensor whose gradient would be lost, or None.
        """
        known = {id(tensor) for tensor in given}
        seen = set(self._ends)
        waiting: list[Node] = []
        for result in results:
            if isinstance(result, Tensor) and result.requires_grad:
                node, place = _edge_of(result)
                if node not in seen and (node, place) not in self._computed:
                    seen.add(node)
                    waiting.append(node)
        for node in self._leaf_nodes(waiting, seen):
            variable = getattr(node, "variable", None)
            # None: a function of nothing that requires gradients
            if variable is not None and id(variable) not in known:
                return variable
        return None

    def _leaf_nodes(
        self, waiting: list[Node], seen: set[Node | None]
    ) -> Iterator[Node]:
        """Yield the nodes without further ones behind some nodes, but for known ones.

        Args:
            waiting: Where to begin; used up.
            seen: Where not to go; what is visited is added.
        """
        computed = self._computed
        while waiting:
            node: Node | None = waiting.pop()
            while node is not None:
                behind = node.next_functions
                if not behind:
                    yield node
                node = None
                for after, place in behind:
                    if after in seen or (computed and (after, place) in computed):
                        continue
                    seen.add(after)
                    if node is None:  # a chain needs no list
                        node = after
                    elif after is not None:
                        waiting.append(after)


def lost_gradient(tensor: Tensor, name: str) -> CaptureError:
    """Return the error for a tensor that steps use and that was not found.

    Args:
        tensor: The tensor.
        name: What the message calls the steps.
    """
    return CaptureError(
        f"{name} of a checkpointed loop use a tensor of shape {tuple(tensor.shape)} "
        f"and type {tensor.dtype} that requires a gradient and that was not found in "
        "the function's closure, defaults, globals or modules: its gradient would be "
        "lost. Name it: checkpointed_loop(..., captures=[tensor])."
    )


def _edge_of(tensor: Tensor) -> Edge:
    node = tensor.grad_fn
    if node is not None:
        return node, tensor.output_nr
    # In inference mode views, by which torch finds a leaf's node, have no graph.
    with torch.inference_mode(mode=False), torch.enable_grad():
        return get_gradient_edge(tensor).node, 0


def _depend_on_each_other(tensors: list[Tensor]) -> bool:
    computed = [tensor for tensor in tensors if tensor.grad_fn is not None]
    if not computed or len(tensors) < 2:
        return False
    nodes = {_edge_of(tensor)[0] for tensor in tensors}
    seen: set[Node] = set()
    waiting = [_edge_of(tensor)[0] for tensor in computed]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is None or node in seen:
                continue
            if node in nodes:
                return True
            seen.add(node)
            waiting.append(node)
    return False


class _Replacing(TorchFunctionMode):
    """Give every operator the twins of the captured tensors."""

    def __init__(self, twins: dict[int, Tensor]) -> None:
        super().__init__()
        self._twins = twins

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the operator with twins."""
        del types
        given, named = map_leaves(self._twin, (args, dict(kwargs or {})))
        return func(*given, **named)

    def _twin(self, leaf: Any) -> Any:
        return self._twins.get(id(leaf), leaf)

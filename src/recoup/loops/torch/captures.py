"""Captures: the tensors that a step uses besides its arguments, found and verified.

They are searched where Python keeps them (closures, defaults, bound objects, modules,
named globals, containers), and every tape is walked: an edge to a tensor that was not
found is an error, because its gradient would be lost. So is a tensor that a step leaves
outside of its state: steps run without a graph, and are recomputed.
"""

import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from recoup.backend.autograd.module_hooks import forward_pre_hooks
from recoup.backend.autograd.saved_tensors import has_hooks
from recoup.backend.memory.storages import version_of
from recoup.backend.state.trees import map_leaves
from recoup.backend.state.walk import reach
from recoup.errors import CaptureError
from recoup.loops.steps import LoopStep

Edge = tuple[Node, int]


def captured_tensors(function: Any) -> list[Tensor]:
    """Return the tensors that require gradients and that a function can reach.

    Costs some microseconds for each visited object.

    Examples:
        >>> import torch
        >>> weight = torch.ones(2, requires_grad=True)
        >>> step = lambda state: state * weight
        >>> captured_tensors(step)[0] is weight
        True
    """
    return [tensor for tensor in reach(function, kind=Tensor) if tensor.requires_grad]


def captured_by(step: LoopStep, leaves: Sequence[Any]) -> list[Tensor]:
    """Return the captures of a step, including those of objects in state and inputs."""
    objects = [leaf for leaf in [*leaves, *step.fed] if not isinstance(leaf, Tensor)]
    return captured_tensors([step.function, *objects])


class CapturedTensors:
    """The captured tensors of one loop.

    Attributes:
        tensors: The tensors themselves, which get the gradients.
        sources: Their replacements on the tapes: the tensors themselves, unless one of
            them was computed from another or has a hook. Then these are stand-ins
            without a graph; else a gradient would pass between them on the tape and
            again behind it, and the hook would be called for every tape.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self._replaced: dict[int, Tensor] = {}
        self.sources = self.tensors
        hooked = any(map(has_hooks, self.tensors))
        if hooked or _depend_on_each_other(self.tensors):
            self.sources = [tensor.detach().requires_grad_() for tensor in self.tensors]
            self._replaced = {
                id(tensor): stand_in
                for tensor, stand_in in zip(self.tensors, self.sources, strict=True)
            }
        edges = {_edge_of(source) for source in self.sources}
        # A leaf's node has one input; a node that computes may have unknown others.
        ends = {node for node, _ in edges if not node.next_functions}
        self._ends: set[Node | None] = {None, *ends}
        self._computed = {edge for edge in edges if edge[0] not in ends}

    def replaced(self) -> AbstractContextManager[Any]:
        """Return a context in which operators see the sources, if they differ."""
        return _Replacing(self._replaced)

    def stray(self, results: Iterable[Any], given: Iterable[Tensor]) -> Tensor | None:
        """Return a tensor that a tape uses and that was neither given nor captured.

        All nodes of the tape are visited, since any step may be the first to use such a
        tensor. Costs about half a microsecond for each.
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
            # None: nothing that requires gradients
            if variable is not None and id(variable) not in known:
                return variable
        return None

    def _leaf_nodes(
        self, waiting: list[Node], seen: set[Node | None]
    ) -> Iterator[Node]:
        """Yield the leaf nodes behind some nodes, except known ones."""
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
    """Return the error for a tensor that steps use and that was not found."""
    return CaptureError(
        f"{name} of a checkpointed loop use a tensor of shape {tuple(tensor.shape)} "
        f"and type {tensor.dtype} that requires a gradient and that was not found in "
        "the function's closure, defaults, globals or modules: its gradient would be "
        "lost; name it: checkpointed_loop(..., captures=[tensor])."
    )


def _edge_of(tensor: Tensor) -> Edge:
    node = tensor.grad_fn
    if node is not None:
        return node, tensor.output_nr
    # In inference mode views, which torch needs to find a leaf's node, have no graph.
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
    """Give every operator the stand-ins of the captured tensors."""

    def __init__(self, stand_ins: dict[int, Tensor]) -> None:
        super().__init__()
        self._stand_ins = stand_ins

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the operator with stand-ins."""
        del types
        stand_ins, given = self._stand_ins, (args, dict(kwargs or {}))
        args, named = map_leaves(lambda leaf: stand_ins.get(id(leaf), leaf), given)
        return func(*args, **named)


_ADVICE = (
    "Return it as part of the state, or as an output with with_outputs=True; keep "
    "numbers, such as float(tensor), for a log."
)


class Outside:
    """The tensors that a function can reach at the time of construction.

    Costs some microseconds for each object that the function can reach, each time.

    Examples:
        >>> import torch
        >>> kept, weight = [], torch.ones(2, requires_grad=True)
        >>> def step(state):
        ...     kept.append(state * weight)
        ...     return kept[-1]
        >>> outside = Outside(step)
        >>> _ = step(torch.ones(2))
        >>> try:
        ...     outside.check("step")
        ... except CaptureError as error:
        ...     print(str(error)[:60])
        'step' keeps a tensor of shape (2,) outside of the state: it
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._strict = False
        self._seen = {
            id(tensor): (tensor, version_of(tensor), tensor.requires_grad)
            for tensor in reach(function, kind=Tensor)
        }

    def settle(self) -> None:
        """Accept tensors that the first step made as its own cache.

        Any further tensor is refused from now on, even without a graph.
        """
        self._strict = True
        for tensor in reach(self._function, kind=Tensor):
            if not tensor.requires_grad and id(tensor) not in self._seen:
                self._seen[id(tensor)] = (tensor, version_of(tensor), False)

    def check(self, name: str) -> None:
        """Raise if the function has left tensors behind."""
        made = _made_by_hooks(self._function)
        now = reach(self._function, kind=Tensor)
        for tensor in now:
            if id(tensor) not in made:
                self._check(tensor, name)
        left = {id(tensor) for tensor in now}
        for address, (tensor, _, required) in self._seen.items():
            if required and address not in left and not made:
                raise CaptureError(
                    f"{name!r} replaces a captured tensor of shape "
                    f"{tuple(tensor.shape)} by another: its gradient would be lost. "
                    f"{_ADVICE}"
                )

    def _check(self, tensor: Tensor, name: str) -> None:
        if id(tensor) not in self._seen:
            if tensor.requires_grad or self._strict:
                raise CaptureError(
                    f"{name!r} keeps a tensor of shape {tuple(tensor.shape)} outside "
                    "of the state: it is made without a graph, and recomputed in "
                    f"backward, so its gradient would be lost. {_ADVICE}"
                )
            return
        _, version, required = self._seen[id(tensor)]
        if tensor.requires_grad and (not required or version_of(tensor) != version):
            raise CaptureError(
                f"{name!r} writes to a captured tensor of shape {tuple(tensor.shape)}: "
                f"the gradient of the written values would be lost. {_ADVICE}"
            )


def holds_other_tensors(leaves: list[Any], known: list[Any]) -> Any:
    """Return an object among the leaves that contains unknown tensors.

    Tensors in tuples, lists and dictionaries are leaves themselves; in other objects
    they cannot be recognised, and gradients would be lost.
    """
    addresses = {id(tensor) for tensor in reach(known, kind=Tensor)}
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            continue
        if isinstance(leaf, (types.GeneratorType, map, filter, zip)):
            return leaf
        if any(id(tensor) not in addresses for tensor in reach(leaf, kind=Tensor)):
            return leaf
    return None


def _made_by_hooks(function: Any) -> set[int]:
    """Return the tensors that hooks such as weight normalization put into modules."""
    return {
        id(value)
        for top in reach(function, kind=nn.Module)
        for module in top.modules()
        if any(True for _ in forward_pre_hooks(module))
        for value in vars(module).values()
        if isinstance(value, Tensor)
    }

"""Compile a function with a custom partition into forward and backward.

AOTAutograd asks a partitioner which forward values to save for backward. Two executors
are supported: Inductor (fused kernels) and AOTAutograd alone (the captured graph with
eager kernels). See `docs/design/compiled.md`.
"""

import copy
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, fx

from recoup.backend import capabilities
from recoup.backend.compiler.batch_norm import (
    forget_running_statistics,
    normalise_again,
)
from recoup.backend.compiler.joint_graphs import (
    JointGraph,
    draws_again,
    is_random,
    is_view,
    read_joint_graph,
)
from recoup.errors import UnsupportedError

Executor = Literal["exact", "inductor"]
"""The executor of a captured block: eager kernels or Inductor."""

Saves = Mapping[str, tuple[str, ...]]
"""The names of saved values by joint graph digest."""


class Probed(Exception):  # noqa: N818 (it ends a compilation that served its purpose)
    """Raised to end a compilation that was only started to get the joint graph."""


class Partitioner:
    """Splits joint graphs into forward and backward by given sets of saved values.

    Args:
        saves: The values that each joint graph saves besides its inputs. Torch's
            default partition is used for other graphs.
        executor: The executor of the result.
        probe: List that collects joint graphs instead of compiling; None: compile.
        notice: Callback for each partitioned joint graph, with the bytes of its named
            saved values, or None if the graph is not in `saves`.
    """

    def __init__(
        self,
        saves: Saves,
        executor: Executor,
        *,
        probe: list[JointGraph] | None = None,
        notice: Callable[[JointGraph, int | None], None] | None = None,
    ) -> None:
        self._saves = {digest: tuple(names) for digest, names in saves.items()}
        self._executor: Executor = executor
        self._probe = probe
        self._notice = notice

    def __call__(self, module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        """Return forward and backward."""
        forward, backward, is_known = self._split(module, inputs, kwargs)
        if is_known and self._executor == "exact":
            forward, backward = _draw_again(module, forward, backward)
        if is_known:
            _refuse_random_twice(forward, backward)
        return forward, backward

    def _split(
        self, module: fx.GraphModule, inputs: Any, kwargs: dict[str, Any]
    ) -> tuple[fx.GraphModule, fx.GraphModule, bool]:
        """Return forward, backward, and whether the graph is in `saves`."""
        from torch._functorch import partitioners

        default = partitioners.choose_saved_values_set
        known = [False]

        def chosen(graph: fx.Graph, node_info: Any, memory_budget: float = 1.0) -> Any:
            fuses = self._executor == "inductor"
            joint = read_joint_graph(graph, node_info, fuses=fuses)
            if self._probe is not None:
                peaks = partial(self._peaks, module, inputs, kwargs, joint.digest)
                self._probe.append(replace(joint, peaks=peaks))
                raise Probed
            names = self._saves.get(joint.digest)
            known[0] = names is not None
            if self._notice is not None:
                self._notice(
                    joint, None if names is None else saved_bytes(joint, names)
                )
            if names is None:
                return default(graph, node_info, memory_budget=memory_budget)
            wanted = set(names)
            nodes = [n for n in graph.nodes if n.name in wanted and n.op != "output"]
            return list(dict.fromkeys([*node_info.inputs, *nodes]))

        forget_running_statistics(module.graph)
        with mock.patch.object(partitioners, "choose_saved_values_set", chosen):
            forward, backward = partitioners.min_cut_rematerialization_partition(
                module, inputs, **kwargs
            )
        normalise_again(forward, backward, kwargs["num_fwd_outputs"])
        return forward, backward, known[0]

    def _peaks(
        self,
        module: fx.GraphModule,
        inputs: Any,
        kwargs: dict[str, Any],
        digest: str,
        names: tuple[str, ...],
    ) -> tuple[int, int]:
        """Return the predicted peaks of forward and backward with some saved values."""
        split = Partitioner({digest: names}, self._executor)
        forward, backward, _ = split._split(copy.deepcopy(module), inputs, kwargs)
        fuses = self._executor == "inductor"
        return split_peaks(forward.graph, backward.graph, fuses=fuses)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without callbacks, for the compiler's caches."""
        return {**vars(self), "_probe": None, "_notice": None}

    def key(self) -> str:
        """Return a text that is equal for partitioners with equal results."""
        return repr(("recoup", 1, self._executor, sorted(self._saves.items())))

    @property
    def is_probe(self) -> bool:
        """Whether it only collects joint graphs."""
        return self._probe is not None


def _draw_again(
    joint: fx.GraphModule, forward: fx.GraphModule, backward: fx.GraphModule
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Make backward redraw forward's random numbers from the generator's state.

    Uses torch's own functions, as for checkpointing inside a compiled function.
    """
    from torch._functorch import config, partitioners
    from torch.utils.checkpoint import CheckpointPolicy

    again = {node.name for node in backward.graph.nodes if draws_again(node)}
    again &= {node.name for node in forward.graph.nodes}
    if not again:
        return forward, backward
    for node in joint.graph.nodes:
        if node.name in again:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    (output,) = (node for node in forward.graph.nodes if node.op == "output")
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
    symbols = sum(
        isinstance(node, fx.Node) and isinstance(node.meta.get("val"), numbers)
        for node in output.args[0]
    )
    # The graph-safe variant would change the signature of both functions.
    with config.patch(graphsafe_rng_functionalization=False):
        return partitioners.functionalize_rng_ops(joint, forward, backward, symbols)


def _refuse_random_twice(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Raise if backward would draw other random numbers than forward."""
    drawn = {
        node.name
        for node in forward.graph.nodes
        if node.op == "call_function" and is_random(node)
    }
    again = [
        node.name
        for node in backward.graph.nodes
        if node.op == "call_function" and node.name in drawn
    ]
    if again:
        raise UnsupportedError(
            f"the partition recomputes random operators ({', '.join(again)}), which "
            "would draw other numbers. Make the plan again with recoup.fit."
        )


def backend_for(partitioner: Partitioner, executor: Executor) -> dict[str, Any]:
    """Return the backend arguments of `compiled_by` for a partitioner.

    Blocks that share compiled code must share this object: Dynamo recompiles for
    another backend.

    Raises:
        UnsupportedError: This torch lacks a part of its compiler that is needed.
    """
    capabilities.require(capabilities.COMPILER)
    if executor == "inductor":
        from recoup.backend.compiler.inductor import InductorPartitioner

        # Fused values are rounded as eager kernels round them, so that recomputed
        # values equal saved ones bit for bit. The cost in time was not measurable.
        return {
            "options": {
                "custom_partitioner_fn": InductorPartitioner(partitioner),
                "emulate_precision_casts": True,
            }
        }
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    # It runs the graph unchanged, and frees saved values after their last use.
    return {"backend": aot_autograd(fw_compiler=boxed_nop, partition_fn=partitioner)}


def compiled_by(
    function: Callable[..., Any], backend: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return a function compiled as one graph by a backend of `backend_for`.

    Dynamo caches compiled code by code object. Each partition needs a separate function
    (`with_own_code`), or it gets the code of another partition.
    """
    return torch.compile(function, dynamic=False, fullgraph=True, **backend)


def with_own_code(function: FunctionType, name: str) -> FunctionType:
    """Return an equivalent function with a copied code object.

    Dynamo calls all functions of torch's own modules from one shared frame, and counts
    recompilations by frame: such functions get an extra frame.
    """
    code = function.__code__
    copy = FunctionType(
        code.replace(co_name=f"{code.co_name}_{name}"),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    if not function.__module__.startswith("torch."):
        return copy

    def called(*args: Any, **kwargs: Any) -> Any:
        return copy(*args, **kwargs)

    return with_own_code(called, name)


def saved_bytes(joint: JointGraph, names: Iterable[str], *, least: int = 0) -> int:
    """Return the total bytes of named values that have at least `least` bytes each."""
    wanted = set(names)
    sizes = (
        joint.graph.bytes_of(value)
        for value, name in enumerate(joint.names)
        if name in wanted
    )
    return sum(nbytes for nbytes in sizes if nbytes >= least)


def hits_recompile_limit(error: BaseException) -> bool:
    """Return whether an error is Dynamo's recompile limit."""
    return type(error).__name__ in ("FailOnRecompileLimitHit", "RecompileLimitExceeded")


def compiler_error(error: BaseException) -> BaseException:
    """Return the cause of a failed compilation, without the compiler's wrappers."""
    inner = getattr(error, "inner_exception", None)
    return compiler_error(inner) if isinstance(inner, BaseException) else error


def split_peaks(
    forward: fx.Graph, backward: fx.Graph, *, fuses: bool
) -> tuple[int, int]:
    """Return the peaks of forward and backward above the bytes in use at their start.

    Operators run in graph order, and a value is freed after its last use. Inputs of the
    block stay in use; values saved for backward are freed.

    Args:
        forward: The forward graph.
        backward: The backward graph.
        fuses: Whether operators are fused: values that only fused operators read are
            then not written to memory.
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
    fuses_away = _fuses_away() if fuses else lambda _: False
    live = peak = 0
    for node in graph.nodes:
        if node.op == "call_function" and owner[node] is node:
            counted[node] = not fuses_away(node)
            live += _bytes(node) if counted[node] else 0
            peak = max(peak, live)
        for value in ends.get(node, ()):
            live -= _bytes(value) if counted.get(value) else 0
    return peak


def _fuses_away() -> Callable[[fx.Node], bool]:
    """Return a predicate: whether all readers of a node's result fuse with it."""
    from torch._functorch import partitioners

    fusible = partitioners.get_default_op_list().is_fusible
    return lambda node: (
        fusible(node)
        and all(user.op == "call_function" and fusible(user) for user in node.users)
    )


def _bytes(node: fx.Node) -> int:
    found = node.meta.get("val")
    parts = found if isinstance(found, list | tuple) else (found,)
    return sum(
        int(part.numel()) * part.dtype.itemsize
        for part in parts
        if isinstance(part, Tensor)
    )

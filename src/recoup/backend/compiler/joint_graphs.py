"""Read AOTAutograd's joint graph of a compiled block as plain data.

The joint graph holds forward and backward of a captured function in one graph. A
planner only needs forward: its operators, their values, which of these backward reads,
and what recomputing or saving each costs.
"""

import hashlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from recoup.backend.compiler.batch_norm import normalises_batch
from recoup.core.graph import BEFORE, Graph, Operation, Storage, Value

_REDUCTIONS = frozenset(
    (
        *("sum", "mean", "var", "var_mean", "std", "prod", "logsumexp"),
        *("amax", "amin", "argmax", "any"),
    )
)


_STATE_BYTES = 1 << 14
"""Random values smaller than this are saved rather than redrawn: redrawing saves the
generator's state instead, 5 KB on the CPU."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """The call of one operator of a joint graph, to time it alone.

    Attributes:
        target: The operator.
        args: Its positional arguments, with a `TensorSpec` in place of each tensor.
        kwargs: Its keyword arguments; none of them is a tensor.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The geometry of a tensor, without its contents."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self, device: torch.device) -> Tensor:
        """Return a tensor of this geometry: random numbers, or zeros for integers."""
        made = torch.empty_strided(
            self.shape, self.stride, dtype=self.dtype, device=device
        )
        return made.normal_() if self.dtype.is_floating_point else made.zero_()


@dataclass(frozen=True)
class JointGraph:
    """The forward half of a joint graph, for planning what backward recomputes.

    Attributes:
        digest: Hash of the structure: operators and connections, not sizes. Graphs with
            equal digests have the same node names.
        graph: Operators and values. Times are zero: see `measure.joint_costs`. An
            operator that must not run twice (writes, collectives, random numbers that
            the compiler draws) is not replayable.
        names: The node name of each value.
        demanded: The values that backward reads.
        resident: Values that are always in memory: parameters and buffers.
        calls: For each operator the call to time, or None if the compiler fuses it with
            its neighbours.
        traffic: For each operator, the bytes that it reads and writes.
        once: Operators that forward does not need: they run once, here or in backward.
        materialized: Values that forward always writes to memory.
        whole: Values read by a backward kernel that cannot fuse their producer.
        draws: Whether forward draws random numbers.
        geometry: Hash of the shape, strides and type of every value, backward included.
        peaks: Function from the names of saved values to the predicted peaks of forward
            and backward above the bytes in use at their start.
    """

    digest: str
    graph: Graph
    names: tuple[str, ...]
    demanded: tuple[int, ...]
    resident: frozenset[int]
    calls: tuple[KernelCall | None, ...]
    traffic: tuple[int, ...]
    once: frozenset[int]
    materialized: frozenset[int]
    whole: frozenset[int]
    draws: bool
    geometry: str = ""
    peaks: Callable[[tuple[str, ...]], tuple[int, int]] = lambda _: (0, 0)

    def likeness(self) -> str:
        """Return a text that is equal for graphs that differ in numbers only.

        Blocks with other rates of dropout or stochastic depth do. They need code of
        their own, but equal sets of saved values take equal bytes and time.
        """
        calls = tuple(map(_without_rates, self.calls))
        return repr((self.digest, self.geometry, calls))


def read_joint_graph(graph: fx.Graph, node_info: Any, *, fuses: bool) -> JointGraph:
    """Return the forward half of a joint graph as data.

    Args:
        graph: The joint graph, as the partitioner gets it.
        node_info: Torch's classification of its nodes.
        fuses: Whether the executor fuses operators; False: each is a kernel.
    """
    return _Reader(graph, node_info, fuses=fuses).read()


class _Reader:
    def __init__(self, graph: fx.Graph, node_info: Any, *, fuses: bool) -> None:
        from torch._functorch import partitioners

        self._graph = graph
        self._info = node_info
        self._backward = {n for n in node_info.tangents_closure if n.op != "output"}
        self._types: Any = partitioners.get_default_op_list() if fuses else None
        self._must_recompute = partitioners.must_recompute
        # The value of each node; a view has its base's.
        self._value: dict[fx.Node, int] = {}
        self._names: list[str] = []
        self._values: list[Value] = []
        self._storages: list[Storage] = []
        self._resident: set[int] = set()
        self._numbers: dict[fx.Node, int] = {}
        self._operations: list[tuple[fx.Node, tuple[int, ...], list[int]]] = []

    def read(self) -> JointGraph:
        for node in self._graph.nodes:
            if node.op == "output" or node in self._backward:
                continue
            if node.op in ("placeholder", "get_attr"):
                self._read_input(node)
            elif is_view(node) and node.args[0] in self._value:
                self._value[node] = self._value[node.args[0]]
            elif node.op == "call_function":
                self._read_call(node)
        written = {
            self._value[n] for n in mutated_inputs(self._graph) if n in self._value
        }
        operations = tuple(
            Operation(
                str(node.target),
                0.0,
                reads,
                tuple(makes),
                replayable=self._is_replayable(node, makes)
                and (written.isdisjoint(reads) or normalises_batch(node)),
            )
            for node, reads, makes in self._operations
        )
        nodes = [node for node, _, _ in self._operations]
        return JointGraph(
            digest=digest_of(self._graph),
            graph=Graph(
                operations=operations,
                backward=0,
                storages=tuple(self._storages),
                values=tuple(self._values),
                saves=(),
                boundaries=(),
                other_bytes=(0,) * len(operations),
            ),
            names=tuple(self._names),
            demanded=tuple(self._demanded()),
            resident=frozenset(self._resident),
            calls=tuple(None if self._is_fused(n) else _call_of(n) for n in nodes),
            traffic=tuple(map(self._traffic, self._operations)),
            once=frozenset(
                number
                for number, node in enumerate(nodes)
                if not self._info.is_required_fw(node)
            ),
            materialized=frozenset(self._where(self._is_materialized)),
            whole=frozenset(self._where(self._is_read_whole)),
            draws=any(
                isinstance(node.target, torch._ops.OpOverload) and is_random(node)
                for node in nodes
            ),
            geometry=geometry_of(self._graph),
        )

    def _read_input(self, node: fx.Node) -> None:
        if not isinstance(node.meta.get("val"), Tensor):
            return
        value = self._add(node, BEFORE)
        static = self._info.static_lifetime_input_nodes
        if node in static or node.op == "get_attr":
            self._resident.add(value)

    def _read_call(self, node: fx.Node) -> None:
        if node.target is operator.getitem and node.args[0] in self._numbers:
            number = self._numbers[node.args[0]]
            if isinstance(node.meta.get("val"), Tensor):
                self._operations[number][2].append(self._add(node, number))
            return
        number = self._numbers[node] = len(self._operations)
        read = (self._value[n] for n in node.all_input_nodes if n in self._value)
        makes: list[int] = []
        self._operations.append((node, tuple(dict.fromkeys(read)), makes))
        if isinstance(node.meta.get("val"), Tensor):
            makes.append(self._add(node, number))

    def _add(self, node: fx.Node, producer: int) -> int:
        value = len(self._values)
        tensor = node.meta["val"]
        nbytes = int(tensor.numel()) * tensor.dtype.itemsize
        made_by: Any = node.args[0] if node.target is operator.getitem else node
        savable = not self._must_recompute(made_by)
        self._storages.append(Storage(nbytes, producer, producer))
        self._values.append(Value(value, producer, holdable=savable))
        self._names.append(node.name)
        self._value[node] = value
        return value

    def _demanded(self) -> Iterator[int]:
        required = self._info.required_bw_nodes
        found: dict[int, None] = {}
        for node, value in self._value.items():
            if node in required or any(user in self._backward for user in node.users):
                found[value] = None
        yield from found

    def _is_replayable(self, node: fx.Node, makes: list[int]) -> bool:
        """Return whether a node may run again in backward.

        Eager kernels can redraw from the saved state of the generator, which takes some
        kilobytes.
        """
        if self._types is None and draws_again(node):
            return sum(self._storages[v].bytes for v in makes) > _STATE_BYTES
        return not is_final(node)

    def _is_fused(self, node: fx.Node) -> bool:
        if self._types is None or _is_reduction(node):
            return False
        name = str(node.target)
        if "inductor_random" in name or "inductor_lookup" in name:
            return True
        return bool(self._types.is_fusible(node))

    def _traffic(self, operation: tuple[fx.Node, tuple[int, ...], list[int]]) -> int:
        _, reads, makes = operation
        return sum(self._storages[value].bytes for value in (*reads, *makes))

    def _where(self, holds: Any) -> Iterator[int]:
        for node, value in self._value.items():
            if node.name == self._names[value] and holds(node, value):
                yield value

    def _is_materialized(self, node: fx.Node, value: int) -> bool:
        producer = self._values[value].producer
        if producer == BEFORE or not self._is_fused(self._operations[producer][0]):
            return True
        return any(
            user.op == "output" or not self._is_fused(user)
            for user in _readers(node)
            if user.op == "output" or self._info.is_required_fw(user)
        )

    def _is_read_whole(self, node: fx.Node, value: int) -> bool:
        del value
        return any(
            user.op == "output" or not (self._is_fused(user) or _is_reduction(user))
            for user in _readers(node)
            if user in self._backward
        )


def digest_of(graph: fx.Graph) -> str:
    """Return a hash of the graph's structure, without sizes."""
    digest = hashlib.sha256()
    for node in graph.nodes:
        inputs = " ".join(source.name for source in node.all_input_nodes)
        digest.update(f"{node.name} {node.op} {node.target} {inputs}\n".encode())
    return digest.hexdigest()[:16]


def geometry_of(graph: fx.Graph) -> str:
    """Return a hash of the shapes, strides and types of all values of the graph."""
    digest = hashlib.sha256()
    for node in graph.nodes:
        found = node.meta.get("val")
        for part in found if isinstance(found, list | tuple) else (found,):
            if isinstance(part, Tensor):
                layout = (tuple(part.shape), part.stride(), part.dtype)
                digest.update(f"{node.name} {layout}\n".encode())
    return digest.hexdigest()[:16]


def is_view(node: fx.Node) -> bool:
    """Return whether a node is a view of its first argument."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target is torch.ops.aten._unsafe_view.default:
        return True
    returns = node.target._schema.returns
    return bool(returns) and all(
        item.alias_info is not None and not item.alias_info.is_write for item in returns
    )


def mutated_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Return the inputs that forward writes to, such as running statistics.

    Values computed from them cannot be recomputed in backward, when the inputs have new
    contents. A node of the graph writes to some, the others are written after it ran.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    found = {
        node.args[0]
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and node.args
        and isinstance(node.args[0], fx.Node)
        and node.args[0].op == "placeholder"
    }
    (output,) = (node for node in graph.nodes if node.op == "output")
    written = [
        description.mutated_input
        for description in output.meta.get("desc", ())
        if hasattr(description, "mutated_input")
    ]
    return found | {node for node in inputs if node.meta.get("desc") in written}


def is_random(node: fx.Node) -> bool:
    """Return whether a node gives a different result when it runs again."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is not operator.getitem
    name = str(target)
    if "inductor_seed" in name:
        return True
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if "inductor_lookup_seed" in name or "inductor_random" in name:
        return False  # a function of a seed, which is an argument
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else None
            return node.kwargs.get("dropout_p", given) not in (0, 0.0, None)
    return True


def draws_again(node: fx.Node) -> bool:
    """Return whether a random node is reproducible from the generator's state.

    Higher-order operators, and operators that write to their arguments, are not.
    """
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in target.tags
        and not target._schema.is_mutable
        and is_random(node)
        and node.meta.get("recompute") is None
    )


def is_final(node: fx.Node) -> bool:
    """Return whether a node must not be recomputed: its results are saved if needed."""
    from torch.utils.checkpoint import CheckpointPolicy

    if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE or is_random(node):
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is not operator.getitem  # higher-order operators
    return "c10d" in target.namespace or target._schema.is_mutable


def _is_reduction(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    name = target._schema.name.partition("::")[2]
    if name in ("max", "min"):
        return not isinstance(node.meta.get("val"), Tensor)
    return name in _REDUCTIONS


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that read a value, directly or through views."""
    found: list[fx.Node] = []
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if is_view(user):
            pending.extend(user.users)
        else:
            found.append(user)
    return found


def _without_rates(argument: Any) -> Any:
    """Return an argument without numbers that do not decide how long it takes."""
    if isinstance(argument, KernelCall):
        parts = (argument.args, tuple(argument.kwargs.items()))
        return (str(argument.target), _without_rates(parts))
    if isinstance(argument, float) and argument not in (0.0, 1.0):
        return "rate"
    if isinstance(argument, list | tuple):
        return tuple(map(_without_rates, argument))
    return argument


def _call_of(node: fx.Node) -> KernelCall | None:
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    try:
        args = tuple(map(_spec, node.args))
    except TypeError:
        return None
    if any(isinstance(value, fx.Node) for value in node.kwargs.values()):
        return None
    return KernelCall(node.target, args, dict(node.kwargs))


def _spec(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        tensor = argument.meta.get("val")
        if not isinstance(tensor, Tensor):
            raise TypeError("an argument is no tensor")
        shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        return TensorSpec(shape, stride, tensor.dtype)
    if isinstance(argument, list | tuple):
        return type(argument)(map(_spec, argument))
    return argument

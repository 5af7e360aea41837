"""Nodes to inspect a region or hand-made checkpoint; the choice which to recompute."""

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from recoup.backend.memory.storages import (
    Geometry,
    alias,
    geometry_of,
    has_storage,
    storage_address,
)
from recoup.engine.lifetime.values import OUTSIDE, Hold, TapeValue
from recoup.engine.recording.observers import Watched
from recoup.engine.recording.region import Region
from recoup.engine.scopes.statistics import Account, NamedAccount, Statistics
from recoup.errors import UsageError

RecomputeFunction = Callable[[], Tensor | Sequence[Tensor]]


class CheckpointNode(Account):
    """One checkpoint: its held values, and how the rest is recomputed.

    recoup makes a node for every region (`scope.nodes`), which does not keep the region
    alive. A node made by hand holds what it is given.

    Args:
        output: The tensor it represents, if any; not kept alive.
        operation: The operation that made the output.
        children: The nodes it depends on.
        region: The region it represents; set by recoup.

    Examples:
        >>> import torch
        >>> x = torch.ones(3)
        >>> node = CheckpointNode(operation="double")
        >>> node.save_activations(x)
        >>> node.add_recompute_function(lambda: x * 2)
        >>> node.recompute()
        (tensor([2., 2., 2.]),)
        >>> node.clear_saved_activations()
        >>> node.saved_activations
        []
    """

    def __init__(
        self,
        output: Tensor | None = None,
        operation: str = "",
        *children: "CheckpointNode",
        region: Watched | None = None,
    ) -> None:
        self.operation = region.name if region is not None else operation
        self.children = children
        self.is_checkpoint = region is not None
        self._output = None if output is None else weakref.ref(output)
        self._region = None if region is None else weakref.ref(region)
        # Tuples, because scopes make a node per layer and an empty tuple is free.
        self._holds: tuple[Hold, ...] = ()
        self._functions: tuple[RecomputeFunction, ...] = ()
        self._results: tuple[weakref.ref[Tensor], ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, without tensors, which belong to a step."""
        of_a_step = {"_output": None, "_region": None, "_holds": (), "_results": ()}
        return {**self.__dict__, **of_a_step, "_functions": ()}

    @property
    def name(self) -> str:
        """The region's name, or the operation's."""
        return self.operation

    @property
    def output(self) -> Tensor | None:
        """The tensor it represents, while that is alive."""
        return None if self._output is None else self._output()

    @property
    def region(self) -> Watched | None:
        """The region it represents, while its graph is alive."""
        return None if self._region is None else self._region()

    @property
    def is_alive(self) -> bool:
        """Whether its region is alive, if it has one."""
        return self._region is None or self._region() is not None

    @property
    def replay_count(self) -> int:
        """The number of replays of the region, even after the region died."""
        region = self.region
        return self.replays if region is None else region.replays

    @property
    def saved_activations(self) -> list[Tensor]:
        """The tensors held, each once.

        Raises:
            ChangedTensorError: One was changed in place since it was saved.
        """
        found: dict[object, Tensor] = {}
        for hold in self.holds():
            if hold.resident is not None:
                tensor = hold.fetch("a checkpoint node")
                found.setdefault(_identity(tensor), tensor)
        return list(found.values())

    def count_bytes(self) -> None:
        """Add the region's kept and freed bytes to its accounts."""
        region = self.region
        if region is not None:
            region.count_bytes()

    def holds(self) -> list[Hold]:
        """Return the tensors that the node and its region hold."""
        region = self.region
        return [*self._holds, *(() if region is None else region.holds())]

    @property
    def recompute_functions(self) -> list[RecomputeFunction]:
        """The functions that `recompute` calls, in order."""
        region = self.region
        replay = [] if region is None else [region.recompute]
        return [*replay, *self._functions]

    def save_activations(self, *activations: Tensor) -> None:
        """Hold tensors by reference; later in-place changes are detected."""
        for activation in activations:
            if not isinstance(activation, Tensor):
                raise UsageError(
                    f"expected tensors to save, got {type(activation).__name__}."
                )
            self._holds = (*self._holds, Hold(alias(activation)))
        self.is_checkpoint = self.is_checkpoint or bool(activations)

    def add_recompute_function(self, function: RecomputeFunction) -> None:
        """Add a function that `recompute` calls after those added before."""
        if not callable(function):
            raise UsageError(
                f"expected a callable recompute function, got {function!r}."
            )
        self._functions = (*self._functions, function)
        self._results = ()

    def recompute(self) -> tuple[Tensor, ...]:
        """Call the recompute functions in order and return all their tensors.

        Returns the last call's tensors again while they are all alive.

        Raises:
            UsageError: There is no recompute function.
        """
        functions = self.recompute_functions
        if not functions:
            raise UsageError(
                f"node {self.name!r} has nothing to recompute with: add a function "
                "with add_recompute_function first."
            )
        cached = [result() for result in self._results]
        if cached and all(tensor is not None for tensor in cached):
            return tuple(tensor for tensor in cached if tensor is not None)
        results = tuple(_flatten(function() for function in functions))
        self._results = tuple(weakref.ref(tensor) for tensor in results)
        return results

    def clear_saved_activations(self) -> None:
        """Free everything held, at once.

        A later backward through its region raises `ClearedError`.
        """
        self._holds = ()
        self._results = ()
        region = self.region
        if region is not None:
            region.clear()


class NodeKeeper:
    """The common part of scopes and groups: the nodes of their regions."""

    _nodes: list[CheckpointNode]
    _account: NamedAccount

    @property
    def nodes(self) -> list[CheckpointNode]:
        """The regions whose graph is still alive, oldest first."""
        self._nodes = [node for node in self._nodes if node.is_alive]
        return list(self._nodes)

    @property
    def memory_bytes(self) -> int:
        """The bytes that living regions hold; shared storages once."""
        return held_bytes(self.nodes)

    @property
    def statistics(self) -> Statistics:
        """The statistics of all regions, including dead ones.

        Prints as a table. Bytes are counted at a region's first replay, or now.
        """
        for node in self.nodes:
            node.count_bytes()
        return self._account.snapshot()


def held_bytes(nodes: Iterable[CheckpointNode]) -> int:
    """Return the bytes that nodes hold, every storage once."""
    storages: dict[int, int] = {}
    for node in nodes:
        for hold in node.holds():
            tensor = hold.resident
            if tensor is not None and has_storage(tensor):
                storages[storage_address(tensor)] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def _flatten(results: Iterable[Any]) -> Iterable[Tensor]:
    for result in results:
        if isinstance(result, Tensor):
            yield result
        else:
            yield from result


def _identity(tensor: Tensor) -> object:
    if not has_storage(tensor):
        return id(tensor)
    return storage_address(tensor), geometry_of(tensor)


_FEW = 20_000
"""The most combinations for exhaustive search, which takes some 20 ms."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that may be recomputed, with its costs.

    Attributes:
        bytes: Bytes held if it is kept, beyond those if it is recomputed.
        cost: The number of operators to recompute it.
    """

    bytes: int
    cost: int


def candidate_of(node: CheckpointNode) -> Candidate:
    """Return the bytes that recomputing a node saves, and its cost.

    For a region these are the saved values produced in it, because external ones are
    always held. For a node made by hand they are all that it holds.
    """
    region = node.region
    if not isinstance(region, Region):
        return Candidate(held_bytes([node]), 1)
    values = [v for v in region.tape.saved if v.demand > 0 and v.producer != OUTSIDE]
    operators = len(region.tape.operations) if region.options.recompute else len(values)
    return Candidate(sum(map(_bytes_of, values)), max(1, operators))


def select(candidates: Sequence[Candidate], budget_bytes: int) -> list[int]:
    """Return the cheapest set to recompute such that the kept values fit.

    At equal cost takes the fewest, and among equal candidates evenly spaced ones. With
    too many kinds for an exhaustive search, prefers the most bytes per cost.

    Examples:
        >>> alike = [Candidate(4, 1)] * 6
        >>> select(alike, 16)
        [1, 4]
        >>> select([Candidate(9, 9), Candidate(5, 1), Candidate(5, 1)], 10)
        [1, 2]
    """
    excess = sum(each.bytes for each in candidates) - budget_bytes
    places: dict[Candidate, list[int]] = {}
    for number, each in enumerate(candidates):
        if each.bytes:
            places.setdefault(each, []).append(number)
    if excess <= 0:
        return []
    kinds = sorted(places, key=lambda kind: -kind.bytes / kind.cost)
    counts = _counts(kinds, [len(places[kind]) for kind in kinds], excess)
    found: list[int] = []
    for kind, count in zip(kinds, counts, strict=True):
        alike = places[kind]
        found += [alike[len(alike) * (2 * i + 1) // (2 * count)] for i in range(count)]
    return sorted(found)


def _counts(
    kinds: Sequence[Candidate], limits: Sequence[int], excess: int
) -> Sequence[int]:
    """Return how many of each kind to recompute to save `excess` bytes."""
    if sum(k.bytes * n for k, n in zip(kinds, limits, strict=True)) <= excess:
        return limits
    if math.prod(limit + 1 for limit in limits) <= _FEW:
        fitting = (
            counts
            for counts in itertools.product(*(range(n + 1) for n in limits))
            if _spared(kinds, counts) >= excess
        )
        return min(
            fitting,
            key=lambda counts: (
                sum(k.cost * n for k, n in zip(kinds, counts, strict=True)),
                sum(counts),
                _spared(kinds, counts),
            ),
        )
    counts = [0] * len(kinds)
    for number, kind in enumerate(kinds):
        left = excess - _spared(kinds, counts)
        counts[number] = min(limits[number], max(0, -(-left // kind.bytes)))
    for number in sorted(range(len(kinds)), key=lambda n: -kinds[n].cost):
        spare = _spared(kinds, counts) - excess
        counts[number] -= min(counts[number], spare // kinds[number].bytes)
    return counts


def _spared(kinds: Sequence[Candidate], counts: Sequence[int]) -> int:
    return sum(k.bytes * n for k, n in zip(kinds, counts, strict=True))


def _bytes_of(value: TapeValue) -> int:
    hold = value.hold
    if hold is not None and hold.tensor is not None:
        return hold.tensor.untyped_storage().nbytes()
    return _extent(value.geometry) if value.geometry is not None else 0


def _extent(geometry: Geometry) -> int:
    shape, stride, offset, dtype, _ = geometry
    if 0 in shape:
        return 0
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return (offset + last + 1) * dtype.itemsize

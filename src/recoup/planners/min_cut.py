"""Values to hold inside a segment: an exact minimum cut, for every price of a byte.

A demanded value is either held, at its price, or its operator is replayed, at its
seconds, and the inputs of the operator are demanded too. The cheapest choice is a
minimum cut (docs/design/planning.md); the prices at which it changes are found by
bisection.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from recoup.core.graph import Floats, Graph, Integers

# SciPy's flows are 32-bit integers. The sum of all finite capacities stays below this,
# so that no flow overflows; prices are exact to one part in 2**30 of their sum.
_SCALE = 2**30


@dataclass(frozen=True)
class Demand:
    """The values that backward demands of an interval, and those that may be held.

    Attributes:
        graph: The step.
        inside: The operations of the interval.
        values: The values made in it that backward needs.
        price_bytes: The price of holding a value, where it is not the bytes of its
            storage: 0 if it is in memory in any case.
        operation_seconds: The cost of each replayed operation besides its time.
        strict: Whether values that are overwritten later cannot be held. A valid lower
            bound must allow them.
    """

    graph: Graph
    inside: range
    values: tuple[int, ...]
    price_bytes: Mapping[int, int]
    operation_seconds: float = 0.0
    strict: bool = True

    @cached_property
    def network(self) -> "Network":
        """The dependency graph for minimum cuts."""
        return Network(self)

    def bytes_of(self, value: int) -> int:
        """Return the price of holding a value."""
        found = self.price_bytes.get(value)
        return self.graph.bytes_of(value) if found is None else found

    def may_hold(self, value: int) -> bool:
        """Return whether a value can be held."""
        return not self.strict or self.graph.values[value].holdable

    def is_forced(self, value: int) -> bool:
        """Return whether a demanded value is held in any case."""
        producer = self.graph.values[value].producer
        return (
            producer not in self.inside
            or not self.graph.operations[producer].replayable
        )


@dataclass(frozen=True)
class Choice:
    """A cut: the held values, and their cost.

    Attributes:
        held: The values that are held although they could be replayed.
        starts: These and the values that are held in any case, as far as needed.
        held_bytes: The price of all held values, the forced ones included.
        seconds: The time of the replay.
    """

    held: frozenset[int]
    starts: frozenset[int]
    held_bytes: int
    seconds: float


def demand_between(
    graph: Graph, first: int, last: int, until: Sequence[int] | Integers
) -> Demand:
    """Return the values that backward needs of an interval; resident ones are free.

    `until` is the last moment at which each storage is in use in any case.
    """
    inside = graph.operations_between(first, last)
    half = len(graph.operations)
    saved = (save.value for save in graph.saves_between(first, last))
    values = dict.fromkeys(v for v in saved if graph.values[v].producer in inside)
    free: dict[int, int] = {}
    for number in inside:
        operation = graph.operations[number]
        for value in (*operation.reads, *operation.makes):
            found = graph.values[value]
            if found.producer not in inside or until[found.storage] >= half:
                free[value] = 0
    return Demand(graph, inside, tuple(values), free)


def choose(
    demand: Demand, byte_seconds: float, held_seconds: Sequence[float] | None = None
) -> frozenset[int]:
    """Return the values to hold that minimise the sum of prices and replayed seconds.

    Costs one maximum flow over the operations on which demanded values depend.

    Args:
        demand: The values that backward needs.
        byte_seconds: The price of a held byte.
        held_seconds: A further price of holding each value of the graph.
    """
    network = demand.network
    prices = byte_seconds * network.nbytes
    if held_seconds is not None:
        prices += [held_seconds[value] for value in network.values]
    return network.held_at(prices)


def evaluate(demand: Demand, held: Iterable[int]) -> Choice:
    """Return the cost of holding some values, without unneeded ones."""
    graph = demand.graph
    forced = demand.network.forced
    ends = forced.union(held)
    replayed: set[int] = set()
    used: set[int] = set()
    stack = list(demand.values)
    while stack:
        value = stack.pop()
        if value in ends:
            used.add(value)
            continue
        producer = graph.values[value].producer
        if producer not in replayed:
            replayed.add(producer)
            stack.extend(graph.operations[producer].reads)
    by_storage: dict[int, int] = {}
    for value in used:
        storage = graph.values[value].storage
        by_storage[storage] = max(by_storage.get(storage, 0), demand.bytes_of(value))
    return Choice(
        frozenset(used - forced),
        frozenset(used),
        sum(by_storage.values()),
        sum(graph.operations[number].seconds for number in replayed)
        + demand.operation_seconds * len(replayed),
    )


def frontier_of(demand: Demand, *, limit: int = 24) -> tuple[Choice, ...]:
    """Return the supported choices between holding all and holding nothing.

    They are the corners of the lower convex hull of bytes held against seconds
    replayed, from the most bytes to the fewest: each the exact minimum for some price
    of a byte.

    At most `limit` minimum cuts are computed; the widest gaps come first.
    """
    most = evaluate(demand, [v for v in demand.values if demand.may_hold(v)])
    least = evaluate(demand, free_values(demand))
    found = {(c.held_bytes, c.seconds): c for c in (most, least)}
    gaps = [(most, least)]
    while gaps and limit:
        left, right = max(gaps, key=lambda gap: _width(*gap))
        gaps.remove((left, right))
        if _width(left, right) <= 0:
            break
        limit -= 1
        byte_seconds = (right.seconds - left.seconds) / (
            left.held_bytes - right.held_bytes
        )
        middle = evaluate(demand, choose(demand, byte_seconds))
        below = left.seconds + byte_seconds * (left.held_bytes - middle.held_bytes)
        if middle.seconds < below * (1 - 1e-7) - 1e-15:
            found[middle.held_bytes, middle.seconds] = middle
            gaps += [(left, middle), (middle, right)]
    return _hull(found.values())


def free_values(demand: Demand) -> list[int]:
    """Return the values that cost nothing to hold."""
    made = [v for n in demand.inside for v in demand.graph.operations[n].makes]
    return [v for v in made if demand.may_hold(v) and not demand.bytes_of(v)]


def _width(left: Choice, right: Choice) -> float:
    """Return the size of the gap between two choices; not positive: none."""
    return min(left.held_bytes - right.held_bytes, 1) * (right.seconds - left.seconds)


def _hull(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """Return the corners of the lower convex hull, by decreasing bytes."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (-c.held_bytes, c.seconds)):
        while hull and choice.seconds <= hull[-1].seconds:
            hull.pop()
        if hull and choice.held_bytes == hull[-1].held_bytes:
            continue
        while len(hull) > 1 and not _turns(hull[-2], hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return tuple(hull)


def _turns(first: Choice, middle: Choice, last: Choice) -> bool:
    """Return whether the middle is below the line from the first to the last."""
    return (middle.seconds - first.seconds) * (first.held_bytes - last.held_bytes) < (
        last.seconds - first.seconds
    ) * (first.held_bytes - middle.held_bytes)


_SOURCE, _SINK = 0, 1


class Network:
    """The flow network of a demand; prices change only its capacities.

    Attributes:
        values: All values that replays could need, by their place.
        nbytes: The price of holding each.
        forced: The values that are held in any case.
    """

    def __init__(self, demand: Demand) -> None:
        graph = demand.graph
        places: dict[int, int] = {}
        self.forced: set[int] = set()
        nodes: dict[int, int] = {}
        pending = list(demand.values)
        while pending:
            value = pending.pop()
            if value in places:
                continue
            places[value] = len(places)
            if demand.is_forced(value):
                self.forced.add(value)
                continue
            producer = graph.values[value].producer
            if producer not in nodes:
                nodes[producer] = len(nodes)
                pending.extend(graph.operations[producer].reads)
        self.values = list(places)
        self.nbytes = np.array([demand.bytes_of(v) for v in places], dtype=np.float64)
        self._seconds = np.array([graph.operations[n].seconds for n in nodes])
        self._seconds += demand.operation_seconds
        # Values are numbered from 2 on, operations after them.
        first = 2 + len(places)
        ends = {operation: first + place for operation, place in nodes.items()}
        self._producers = [
            ends.get(graph.values[value].producer, _SINK) for value in places
        ]
        self._may_cut = np.array(
            [
                *(value in self.forced or demand.may_hold(value) for value in places),
                *(True for _ in nodes),
            ],
            dtype=np.bool_,
        )
        self._flow = _FlowGraph(
            first + len(nodes),
            [
                *zip(range(2, first), self._producers, strict=True),
                *((node, _SINK) for node in ends.values()),
                *((_SOURCE, 2 + places[v]) for v in dict.fromkeys(demand.values)),
                *(
                    (first + place, 2 + places[read])
                    for place, number in enumerate(nodes)
                    for read in dict.fromkeys(graph.operations[number].reads)
                ),
            ],
        )

    def held_at(self, prices: Floats) -> frozenset[int]:
        """Return the values that the cheapest choice holds, except forced ones."""
        costs = np.concatenate([prices, self._seconds])
        is_finite = self._may_cut & (costs < inf)
        finite = np.where(is_finite, np.maximum(costs, 0.0), 0.0)
        whole = np.rint(finite * (_SCALE / (finite.sum() or 1.0))).astype(np.int64)
        boundless = int(whole.sum()) + 1
        reached = self._flow.reached(np.where(is_finite, whole, boundless), boundless)
        return frozenset(
            value
            for node, (value, operation) in enumerate(
                zip(self.values, self._producers, strict=True), 2
            )
            if node in reached and operation not in reached and operation != _SINK
        )


class _FlowGraph:
    """A graph in which flows from node 0 to node 1 are found for many capacities.

    SciPy needs each edge in both directions; they are sorted once.
    """

    def __init__(self, size: int, edges: Sequence[tuple[int, int]]) -> None:
        starts, stops = np.array(edges, dtype=np.int32).reshape(-1, 2).T
        rows, columns = np.concatenate([[starts, stops], [stops, starts]], axis=1)
        order = np.lexsort((columns, rows))
        self._edges = len(edges)
        self._places = np.argsort(order)[: len(edges)]
        self._columns = columns[order]
        self._rows = np.searchsorted(rows[order], np.arange(size + 1)).astype(np.int32)
        amounts = np.zeros(2 * len(edges), dtype=np.int32)
        self._graph: Any = csr_array(
            (amounts, self._columns, self._rows), shape=(size, size)
        )

    def reached(self, capacities: Integers, others: int) -> set[int]:
        """Return the nodes that node 0 reaches in the residual graph of a maximum flow.

        `capacities` are those of the first edges, `others` that of each other edge.
        """
        amounts = np.zeros(2 * self._edges, dtype=np.int32)
        amounts[self._places] = others
        amounts[self._places[: len(capacities)]] = capacities
        self._graph.data = amounts
        flow: Any = maximum_flow(self._graph, 0, 1).flow
        is_open = amounts > flow.data
        rows = np.concatenate([[0], np.cumsum(is_open)])[self._rows]
        residual = csr_array(
            (np.ones(rows[-1]), self._columns[is_open], rows.astype(np.int32)),
            shape=self._graph.shape,
        )
        order = breadth_first_order(residual, 0, return_predecessors=False)
        return set(order.tolist())

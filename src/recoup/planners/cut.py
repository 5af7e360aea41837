"""What to hold inside a segment: an exact minimum cut, for every price of a byte.

A demanded value is either held, at its price, or its operator is replayed, at its
seconds, and then what the operator reads is demanded too. The cheapest choice is a
minimum cut (docs/design/planning.md); the prices at which it changes are found by
bisection.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from recoup.core.graph import Graph

# SciPy's flows are 32-bit integers. The sum of all finite capacities stays below this,
# so that no flow overflows; prices are exact to one part in 2**30 of their sum.
_SCALE = 2**30

_FEW_EDGES = 256


@dataclass(frozen=True)
class Demand:
    """What backward demands of a stretch of forward, and what may be held.

    Attributes:
        graph: The step.
        inside: The operations of the stretch.
        values: The values made in it that backward needs.
        price_bytes: What holding a value costs, where it is not the bytes of its
            storage: 0 for one that is in memory in any case.
        operation_seconds: What each operation that is replayed costs beside its time.
        strict: Whether values that are written over later cannot be held. A bound that
            holds for everyone must let them.
    """

    graph: Graph
    inside: range
    values: tuple[int, ...]
    price_bytes: Mapping[int, int]
    operation_seconds: float = 0.0
    strict: bool = True

    def bytes_of(self, value: int) -> int:
        """Return what holding a value costs."""
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
    """What is held, and what that costs.

    Attributes:
        held: The values that are held although they could be replayed.
        held_bytes: What all held values cost, the forced ones included.
        seconds: What is replayed, and penalties for it.
    """

    held: frozenset[int]
    held_bytes: int
    seconds: float


def choose(
    demand: Demand,
    price: Callable[[int], float],
    *,
    penalty: Mapping[int, float] | None = None,
) -> frozenset[int]:
    """Return the values to hold for which prices and replayed seconds are least.

    Args:
        demand: What is needed.
        price: What holding a value costs, in seconds.
        penalty: Seconds to add to operations if they are replayed.

    Costs one maximum flow over the operations that what is demanded depends on.
    """
    graph = demand.graph
    network = _Network()
    pending = list(demand.values)
    network.demand(pending)
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if demand.is_forced(value):
            network.add(("value", value), _SINK, price(value))
            continue
        producer = graph.values[value].producer
        network.add(
            ("value", value),
            ("operation", producer),
            price(value) if demand.may_hold(value) else None,
        )
        operation = graph.operations[producer]
        extra = penalty.get(producer, 0.0) if penalty else demand.operation_seconds
        if network.once(("operation", producer), operation.seconds + extra):
            for read in operation.reads:
                network.add(("operation", producer), ("value", read), None)
            pending.extend(operation.reads)
    reached = network.source_side()
    return frozenset(
        value
        for value in seen
        if ("value", value) in reached
        and not demand.is_forced(value)
        and ("operation", graph.values[value].producer) not in reached
    )


def evaluate(demand: Demand, held: Iterable[int]) -> Choice:
    """Return what holding some values costs; those that nobody needs are left out."""
    graph = demand.graph
    allowed = set(held)
    replayed: set[int] = set()
    used: set[int] = set()
    stack = list(demand.values)
    while stack:
        value = stack.pop()
        if demand.is_forced(value) or value in allowed:
            used.add(value)
        elif graph.values[value].producer not in replayed:
            producer = graph.values[value].producer
            replayed.add(producer)
            stack.extend(graph.operations[producer].reads)
    by_storage: dict[int, int] = {}
    for value in used:
        storage = graph.values[value].storage
        by_storage[storage] = max(by_storage.get(storage, 0), demand.bytes_of(value))
    return Choice(
        frozenset(value for value in used if not demand.is_forced(value)),
        sum(by_storage.values()),
        sum(graph.operations[number].seconds for number in replayed)
        + demand.operation_seconds * len(replayed),
    )


def frontier_of(demand: Demand, *, limit: int = 24) -> tuple[Choice, ...]:
    """Return the supported choices between holding all and holding nothing.

    They are the corners of the lower convex hull of bytes held against seconds
    replayed, from the most bytes to the fewest: each the exact minimum for some price
    of a byte.

    Args:
        demand: What is needed.
        limit: The most minimum cuts to compute; the widest gaps come first.
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
        held = choose(demand, lambda v, p=byte_seconds: p * demand.bytes_of(v))
        middle = evaluate(demand, held)
        below = left.seconds + byte_seconds * (left.held_bytes - middle.held_bytes)
        if middle.seconds < below * (1 - 1e-7) - 1e-15:
            found[middle.held_bytes, middle.seconds] = middle
            gaps += [(left, middle), (middle, right)]
    return _hull(found.values())


def free_values(demand: Demand) -> list[int]:
    """Return the values that are held for nothing."""
    made = [v for n in demand.inside for v in demand.graph.operations[n].makes]
    return [v for v in made if demand.may_hold(v) and not demand.bytes_of(v)]


def _width(left: Choice, right: Choice) -> float:
    """Return how much there is between two choices; not positive: nothing."""
    return min(left.held_bytes - right.held_bytes, 1) * (right.seconds - left.seconds)


def _hull(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """Return the corners of the lower convex hull, by falling bytes."""
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


_Node = tuple[str, int]
_SOURCE: _Node = ("source", 0)
_SINK: _Node = ("sink", 0)


class _Network:
    """A flow network; a capacity of None is infinite."""

    def __init__(self) -> None:
        self._numbers: dict[_Node, int] = {_SOURCE: 0, _SINK: 1}
        self._joined: set[_Node] = set()
        self._finite: dict[tuple[int, int], float] = {}
        self._infinite: set[tuple[int, int]] = set()

    def demand(self, values: Iterable[int]) -> None:
        """Put values on the source's side."""
        for value in values:
            self.add(_SOURCE, ("value", value), None)

    def once(self, node: _Node, seconds: float) -> bool:
        """Join a node to the sink unless it is known; return whether it was not."""
        if node in self._joined:
            return False
        self._joined.add(node)
        self.add(node, _SINK, seconds)
        return True

    def add(self, tail: _Node, head: _Node, capacity: float | None) -> None:
        """Add an edge, or the capacity of one that is known."""
        numbers = self._numbers
        edge = (
            numbers.setdefault(tail, len(numbers)),
            numbers.setdefault(head, len(numbers)),
        )
        if capacity is None:
            self._infinite.add(edge)
        elif capacity > 0:
            self._finite[edge] = self._finite.get(edge, 0.0) + capacity

    def source_side(self) -> set[_Node]:
        """Return the nodes that a minimum cut leaves with the source."""
        finite = [edge for edge in self._finite if edge not in self._infinite]
        capacities = np.array([self._finite[edge] for edge in finite])
        total = float(capacities.sum()) or 1.0
        whole = np.rint(capacities * (_SCALE / total)).astype(np.int64)
        boundless = int(whole.sum()) + 1
        edges = finite + list(self._infinite)
        amounts = [*whole.tolist(), *([boundless] * len(self._infinite))]
        size = len(self._numbers)
        search = reached_by_paths if len(edges) <= _FEW_EDGES else _reached_by_scipy
        reached = search(size, edges, amounts)
        return {node for node, number in self._numbers.items() if number in reached}


def reached_by_paths(
    size: int, edges: Sequence[tuple[int, int]], capacities: Sequence[int]
) -> set[int]:
    """Return what node 0 reaches beside a maximum flow to node 1: shortest paths.

    For small networks this is faster than to hand them to SciPy.

    Examples:
        >>> reached_by_paths(4, [(0, 2), (2, 3), (3, 1)], [5, 2, 7])
        {0, 2}
    """
    room: list[dict[int, int]] = [{} for _ in range(size)]
    for (tail, head), capacity in zip(edges, capacities, strict=True):
        room[tail][head] = room[tail].get(head, 0) + capacity
        room[head].setdefault(tail, 0)
    while True:
        came: dict[int, int] = {0: 0}
        queue = [0]
        for node in queue:
            for head, left in room[node].items():
                if left > 0 and head not in came:
                    came[head] = node
                    queue.append(head)
            if 1 in came:
                break
        else:
            return set(queue)
        path = [1]
        while path[-1]:
            path.append(came[path[-1]])
        steps = [(tail, head) for head, tail in pairwise(path)]
        flow = min(room[tail][head] for tail, head in steps)
        for tail, head in steps:
            room[tail][head] -= flow
            room[head][tail] += flow


def _reached_by_scipy(
    size: int, edges: Sequence[tuple[int, int]], capacities: Sequence[int]
) -> set[int]:
    ends = np.array(edges, dtype=np.int32).reshape(-1, 2)
    graph = csr_array(
        (np.array(capacities, dtype=np.int32), (ends[:, 0], ends[:, 1])),
        shape=(size, size),
    )
    residual = csr_array(graph - maximum_flow(graph, 0, 1).flow)
    residual.eliminate_zeros()
    order = breadth_first_order(residual, 0, return_predecessors=False)
    return set(order.tolist())

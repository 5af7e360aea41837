"""Lower bounds on the recomputation of any plan within a budget.

At any moment, each value that backward needs later is either in memory or recomputed
after that moment. So for a price of a byte, the minimum cut over the whole of forward
less the price of the room is a lower bound of the recomputation; the best price is
found by bisection. A knapsack, which ignores that operators need inputs, selects the
moment. Both hold for every plan that keeps the order of operators: any segments, nested
or not, and any values held.
"""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from recoup.core.graph import Graph
from recoup.core.simulation import simulate
from recoup.planners.min_cut import (
    Choice,
    Demand,
    choose,
    evaluate,
    free_values,
)

_CANDIDATES = 16
_CUTS = 10


def bound_seconds(
    graph: Graph, budget_bytes: int, *, may_offload: bool = False
) -> float:
    """Return a lower bound of the seconds that a plan within a budget adds.

    Costs about ten minimum cuts over forward, twice as many with offloading.
    """
    best = 0.0
    for moment in _tightest(graph, budget_bytes):
        demand, base_bytes = demand_at(graph, moment)
        room_bytes = budget_bytes - base_bytes
        if may_offload and graph.link_bytes_per_second:
            found = _bound_with_link(demand, room_bytes)
        else:
            found = _bound(demand, room_bytes)
        best = max(best, found)
    return best


def demand_at(graph: Graph, moment: int) -> tuple[Demand, int]:
    """Return the values needed after a moment, and the bytes in use there anyway."""
    half = len(graph.operations)
    inside = range(min(moment + 1, half))
    sizes, born, dies = graph.arrays
    is_there = (born <= moment) & (moment <= dies)
    later: dict[int, None] = {}
    for save in graph.saves:
        if save.used <= moment <= save.released:
            is_there[graph.storage_of[save.value]] = True
        elif save.used > moment and graph.values[save.value].producer in inside:
            later[save.value] = None
    # The content of a storage is its last version; an earlier one would be a copy.
    values, producers, storages = graph.versions
    made = bisect_right(producers, moment)
    current = dict(zip(storages[:made], values[:made], strict=True))
    price_bytes = {number: 0 for s, number in current.items() if is_there[s]}
    base_bytes = graph.other_bytes[moment] + int(sizes[is_there].sum())
    recording = graph.recording_seconds
    demand = Demand(graph, inside, tuple(later), price_bytes, recording, strict=False)
    return demand, base_bytes


def _bound(demand: Demand, room_bytes: int) -> float:
    """Return the best bound that a price of a byte gives for some room."""
    return max(
        choice.seconds + price * (choice.held_bytes - room_bytes)
        for price, choice in _priced(demand, room_bytes)
    )


def _bound_with_link(demand: Demand, room_bytes: int) -> float:
    """Return the best bound when bytes may also go to the host.

    Copying a byte saves its price. Copies are hidden for a third of a step; beyond that
    each takes its time on the link, and beyond two thirds twice its time. At a higher
    price anything could be copied, and the bound is empty.
    """
    graph = demand.graph
    byte_seconds = 1 / graph.link_bytes_per_second
    third = graph.step_seconds / 3
    best = 0.0
    for copied in (third / byte_seconds, 2 * third / byte_seconds):
        for price, choice in _priced(demand, int(room_bytes + copied)):
            if price > 2 * byte_seconds:
                continue
            saved = price * third / byte_seconds
            if price > byte_seconds:
                saved = 2 * saved - third
            seconds = choice.seconds + price * (choice.held_bytes - room_bytes) - saved
            best = max(best, seconds)
    return best


def _priced(demand: Demand, room_bytes: int) -> Iterator[tuple[float, Choice]]:
    """Yield prices of a byte with the best choice for each, converging on some room."""
    left = evaluate(demand, demand.values)
    yield 0.0, left
    right = evaluate(demand, free_values(demand))
    for _ in range(_CUTS if left.held_bytes > room_bytes else 0):
        if right.held_bytes >= left.held_bytes or right.seconds <= left.seconds:
            break
        price = (right.seconds - left.seconds) / (left.held_bytes - right.held_bytes)
        middle = evaluate(demand, choose(demand, price))
        yield price, middle
        on_line = left.seconds + price * (left.held_bytes - middle.held_bytes)
        if middle.seconds >= on_line * (1 - 1e-9):
            break
        if middle.held_bytes > room_bytes:
            left = middle
        else:
            right = middle


def _tightest(graph: Graph, budget_bytes: int) -> list[int]:
    """Return the moments at which a knapsack bound is largest."""
    profile = np.array(simulate(graph, ()).bytes_at)
    if not len(profile):
        return []
    edges = np.unique(np.linspace(0, len(profile), _CANDIDATES + 1).astype(np.int64))
    tops = [int(a + profile[a:b].argmax()) for a, b in pairwise(edges)]
    tops.append(int(profile.argmax()))
    scored = {moment: knapsack_bound(graph, budget_bytes, moment) for moment in tops}
    return sorted(scored, key=lambda moment: -scored[moment])[:1]


def knapsack_bound(graph: Graph, budget_bytes: int, moment: int) -> float:
    """Return a bound from one moment that ignores inputs of recomputed operators."""
    demand, base_bytes = demand_at(graph, moment)
    by_producer: dict[int, set[int]] = {}
    for value in demand.values:
        if demand.bytes_of(value) and not demand.is_forced(value):
            producer = graph.values[value].producer
            by_producer.setdefault(producer, set()).add(graph.values[value].storage)
    items = [
        (
            graph.operations[producer].seconds,
            sum(graph.storages[s].bytes for s in found),
        )
        for producer, found in by_producer.items()
    ]
    missing = base_bytes + sum(size for _, size in items) - budget_bytes
    total = 0.0
    for seconds, size in sorted(items, key=lambda item: item[0] / item[1]):
        if missing <= 0:
            break
        total += seconds * min(1.0, missing / size)
        missing -= size
    return total

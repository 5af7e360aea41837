"""Places where segments should begin: where few bytes of forward cross."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from recoup.core.graph import Floats, Graph

_NEAR = 2
"""The number of places to each side that a place is compared with."""


def crossing_bytes(graph: Graph) -> Floats:
    """Return for each boundary the bytes made before it and read after it."""
    count = len(graph.operations)
    last: dict[int, int] = {}
    for number, operation in enumerate(graph.operations):
        for value in operation.reads:
            last[graph.values[value].storage] = number
    changes = np.zeros(count + 2)
    for storage, reader in last.items():
        born = graph.storages[storage].born
        if 0 <= born < reader:
            changes[born + 1] += graph.storages[storage].bytes
            changes[reader + 1] -= graph.storages[storage].bytes
    return np.cumsum(changes)[list(graph.places)]


def narrow_places(
    graph: Graph, *, most: int, always: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return boundaries at which fewer bytes cross than at most others near them.

    About `most` are returned, and those in `always`; of each interval of equal saved
    bytes, the narrowest comes first.
    """
    crossing = crossing_bytes(graph)
    first, last = _ends(graph)
    torn = _torn(graph)
    distinct = [p for p in _distinct(graph, first, last) if p not in torn]
    chosen = {first, last, *(place for place in always if first <= place <= last)}
    found: list[int] = []
    for number, place in enumerate(distinct):
        near = distinct[max(0, number - _NEAR) : number + _NEAR + 1]
        if crossing[place] <= 1.05 * min(crossing[other] for other in near):
            found.append(place)
    if len(found) > most:
        found = _spread(graph, found, crossing, most)
    return tuple(sorted(chosen | set(found)))


def ends_of_runs(graph: Graph) -> tuple[int, ...]:
    """Return the boundaries at which one run ends and another begins.

    Examples:
        >>> from recoup.core.graph import Boundary
        >>> places = tuple(Boundary(0, 0, model_call=n // 2) for n in range(4))
        >>> ends_of_runs(Graph((), 0, (), (), (), places, ()))
        (1, 2)
    """
    pairs = enumerate(pairwise(graph.runs), start=1)
    return tuple(number for number, (before, after) in pairs if before != after)


def _torn(graph: Graph) -> set[int]:
    """Return the boundaries between the production of a value and its overwrite."""
    spoilt = [v for v in graph.values if not v.holdable and v.producer >= 0]
    writes: dict[int, list[int]] = {}
    for value in graph.values:
        writes.setdefault(value.storage, []).append(value.producer)
    found: set[int] = set()
    for value in spoilt:
        later = [p for p in writes[value.storage] if p > value.producer]
        low = bisect_right(graph.places, value.producer)
        high = bisect_right(graph.places, min(later, default=-1))
        found.update(range(low, high))
    return found


def _ends(graph: Graph) -> tuple[int, int]:
    if len(graph.blocks) > 1:
        return graph.blocks[0], graph.blocks[-1]
    return 0, len(graph.boundaries) - 1


def _distinct(graph: Graph, first: int, last: int) -> list[int]:
    """Return one boundary for each distinct position in operations and saves."""
    found: dict[tuple[int, int], int] = {}
    for place in range(first, last + 1):
        boundary = graph.boundaries[place]
        found.setdefault((boundary.operation, boundary.saves), place)
    return list(found.values())


class Finer:
    """Splits intervals where few bytes cross, into parts of about equal saved bytes."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._crossing = crossing_bytes(graph)
        self._weights = _weights(graph)
        self._torn = _torn(graph)

    def split(self, first: int, last: int, parts: int) -> list[int]:
        """Return boundaries from a first to a last with about `parts` intervals."""
        places = _distinct(self._graph, first, last)
        places = [p for p in places if p in (first, last) or p not in self._torn]
        weights = self._weights[places]
        found = [first]
        for part in range(1, parts):
            share = (weights - weights[0]) / ((weights[-1] - weights[0]) or 1.0)
            near = [
                place
                for place, at in zip(places, share, strict=True)
                if abs(at - part / parts) <= 0.5 / parts and found[-1] < place < last
            ]
            if near:
                found.append(min(near, key=lambda place: self._crossing[place]))
        return [*found, last]


def _weights(graph: Graph) -> Floats:
    """Return for each boundary the saved bytes made before it."""
    weights = np.zeros(len(graph.operations) + 1)
    for value in {save.value for save in graph.saves}:
        weights[graph.values[value].producer + 1] += graph.bytes_of(value)
    return np.cumsum(weights)[list(graph.places)]


def _spread(
    graph: Graph, places: Sequence[int], crossing: Floats, most: int
) -> list[int]:
    """Return the narrowest place of each of `most` intervals of equal weight."""
    weights = _weights(graph)
    total = weights[-1] or 1.0
    best: dict[int, int] = {}
    for place in places:
        group = int(most * weights[place] / total)
        if group not in best or crossing[place] < crossing[best[group]]:
            best[group] = place
    return list(best.values())

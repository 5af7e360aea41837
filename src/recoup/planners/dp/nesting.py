"""Segments inside segments, for budgets below what one level can meet.

A segment with others inside is replayed first to remake what these start from, and then
they are replayed one by one: an operator runs again once for each level, and only the
starts of one level and one innermost segment are in memory at a time.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from recoup.core.graph import Graph
from recoup.core.segments import Action, Segment


def nestings(places: Sequence[int]) -> list[Segment]:
    """Return segments from the first place to the last with others inside.

    They are: one segment between each two places; about as many segments as each has
    places; and halves inside halves, which holds least and repeats most.

    Examples:
        >>> flat, square, halves = nestings([0, 1, 2, 3, 4])
        >>> len(flat.inner), len(square.inner), len(halves.inner[0].inner)
        (4, 2, 2)
    """
    leaves = tuple(Segment(a, b) for a, b in pairwise(places))
    found = [Segment(places[0], places[-1], inner=leaves)]
    if len(leaves) > 3:
        length = math.isqrt(len(leaves))
        groups = [leaves[i : i + length] for i in range(0, len(leaves), length)]
        merged = tuple(Segment(g[0].start, g[-1].stop) for g in groups)
        found.append(Segment(places[0], places[-1], inner=merged))
        found.append(_halved(places))
    return found


def holds(graph: Graph, segment: Segment, held: Iterable[int]) -> Segment:
    """Return a segment that holds some values, at every level."""
    inside = graph.operations_between(segment.start, segment.stop)
    mine = [value for value in held if graph.values[value].producer in inside]
    return Segment(
        segment.start,
        segment.stop,
        dict.fromkeys(mine, Action.KEEP),
        tuple(holds(graph, inner, mine) for inner in segment.inner),
    )


def _halved(places: Sequence[int]) -> Segment:
    if len(places) == 2:
        return Segment(places[0], places[1])
    middle = len(places) // 2
    halves = (places[: middle + 1], places[middle:])
    return Segment(places[0], places[-1], inner=tuple(map(_halved, halves)))

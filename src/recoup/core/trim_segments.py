"""Remove parts of segments that save nothing: idle actions, segments and ends.

A trimmed segment covers only the operators that are recomputed, and the saves.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter

from recoup.core.footprint import Footprint, footprint, replayed
from recoup.core.graph import Graph
from recoup.core.segments import (
    REGION_OPERATORS,
    Action,
    Interval,
    Segment,
    part_of,
    recorded_operators,
)

_WORTH = 2 * REGION_OPERATORS
"""The gap in operators from which two segments cost less than one."""


def narrowed(graph: Graph, segment: Segment) -> tuple[Segment, ...]:
    """Return segments with the same recomputation that record less of forward.

    A region must record the operators that make and save a value that it recomputes.
    Values before, after and between are kept without a region. Segments that are
    nested or offload values stay unchanged.

    Costs time in proportion to the recomputed operators.
    """
    if not _may_be_narrowed(segment):
        return (segment,)
    inside = graph.operations_between(segment.start, segment.stop)
    needed: list[Interval] = []
    for save in _saves_of_recomputed(graph, segment):
        value = graph.saves[save].value
        operations, _ = replayed(graph, inside, [value], segment.actions)
        needed.append(_around(graph, segment, operations, [save]))
    intervals: list[Interval] = []
    for start, stop in sorted(needed):
        if intervals and _touch(graph, intervals[-1][1], start):
            before, until = intervals.pop()
            start, stop = before, max(until, stop)
        intervals.append((start, stop))
    return tuple(part_of(graph, segment, interval) for interval in intervals)


def recorded_narrowly(graph: Graph, segment: Segment, found: Footprint) -> int:
    """Return the number of recorded operators of a segment trimmed to one interval."""
    if not _may_be_narrowed(segment):
        return found.recorded
    if not found.replays:
        return 0
    first = next(_saves_of_recomputed(graph, segment))
    last = next(_saves_of_recomputed(graph, segment, backwards=True))
    (replay,) = found.replays
    around = _around(graph, segment, replay.operations, (first, last))
    return recorded_operators(len(graph.operations_between(*around)))


def _may_be_narrowed(segment: Segment) -> bool:
    offloads = Action.OFFLOAD in segment.actions.values()
    return not segment.inner and not segment.by_call and not offloads


def _around(
    graph: Graph, segment: Segment, operations: Sequence[int], saves: Sequence[int]
) -> Interval:
    """Return the nearest boundaries around operators and saves of a segment."""
    ends, saved = (segment.start, segment.stop + 1), attrgetter("saves")
    start = min(
        bisect_right(graph.places, operations[0], *ends),
        bisect_right(graph.boundaries, saves[0], *ends, key=saved),
    )
    stop = max(
        bisect_right(graph.places, operations[-1], *ends),
        bisect_right(graph.boundaries, saves[-1], *ends, key=saved),
    )
    return start - 1, stop


def _saves_of_recomputed(
    graph: Graph, segment: Segment, *, backwards: bool = False
) -> Iterator[int]:
    """Yield the saves in a segment of values that it makes and does not hold."""
    first, last = graph.boundaries[segment.start], graph.boundaries[segment.stop]
    inside = range(first.operation, last.operation)
    saves = range(first.saves, last.saves)
    for save in reversed(saves) if backwards else saves:
        value = graph.saves[save].value
        if value not in segment.actions and graph.remade_by[value] in inside:
            yield save


def _touch(graph: Graph, stop: int, start: int) -> bool:
    """Return whether two intervals overlap, or are too close for two regions."""
    places = graph.boundaries
    between = places[start].operation - places[stop].operation
    return start < stop or between <= _WORTH


def without_idle_actions(graph: Graph, segment: Segment) -> Segment:
    """Return the segment without actions on values that are no roots of a replay.

    Neither backward nor a replay needs these, but a region would hold them. The cost of
    the segment stays the same.

    Examples:
        >>> from recoup.core.graph import Boundary
        >>> from recoup.core.segments import Action
        >>> segment = Segment(0, 1, {3: Action.KEEP})
        >>> places = (Boundary(0, 0), Boundary(0, 0))
        >>> empty = Graph((), 0, (), (), (), places, ())
        >>> without_idle_actions(empty, segment).actions
        {}
    """
    if segment.by_call:
        return segment
    starts = iter(footprint(graph, segment).starts)

    def rebuilt(segment: Segment) -> Segment:
        inner = tuple(rebuilt(child) for child in segment.inner)
        _, roots = next(starts)
        used = set(roots)
        actions = {v: a for v, a in segment.actions.items() if v in used}
        return Segment(segment.start, segment.stop, actions, inner)

    return rebuilt(segment)


def is_idle(graph: Graph, segment: Segment) -> bool:
    """Return whether a segment replays nothing and offloads nothing.

    Then it holds all that autograd would, at least as long, and records in vain.
    """
    inside = graph.operations_between(segment.start, segment.stop)
    if any(graph.values[one.value].producer in inside for one in graph.dropped):
        return False  # autograd would hold values that backward does not use
    found = footprint(graph, segment)
    return not found.replays and not found.offloads

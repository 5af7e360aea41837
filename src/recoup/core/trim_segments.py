"""Segments without what saves nothing: idle actions, idle segments, idle ends.

A narrow segment is around no more of forward than what is recomputed and its uses.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from recoup.core.footprint import Footprint, footprint, replayed
from recoup.core.graph import Graph, Integers
from recoup.core.segments import (
    REGION_OPERATORS,
    Action,
    Segment,
    recorded_operators,
)

_WORTH = 2 * REGION_OPERATORS
"""Operators between two segments from which two segments cost less than one."""


def narrowed(graph: Graph, segment: Segment) -> tuple[Segment, ...]:
    """Return segments that recompute what one does, and record less of forward.

    A region has to see a value being made that it recomputes, and being saved. What
    lies before, after and between is kept there as it is without a region. Segments
    with others inside, or that move values elsewhere, stay as they are.

    Costs time in proportion to what is recomputed.
    """
    if not _may_be_narrowed(segment):
        return (segment,)
    intervals: list[tuple[int, int]] = []
    for start, stop in sorted(_intervals(graph, segment)):
        if intervals and _touch(graph, intervals[-1][1], start):
            before, until = intervals.pop()
            start, stop = before, max(until, stop)
        intervals.append((start, stop))
    return tuple(_part(graph, segment, *interval) for interval in intervals)


def recorded_narrowly(graph: Graph, segment: Segment, found: Footprint) -> int:
    """Return how much a segment records when it is narrowed, to one at the most."""
    if not _may_be_narrowed(segment):
        return found.recorded
    saves = _saves_of_recomputed(graph, segment)
    if not saves:
        return 0
    (replay,) = found.replays
    count = operators_around(
        graph,
        (segment.start, segment.stop),
        np.array([[replay.operations[0]], [replay.operations[-1]]]),
        np.array([[saves[0]], [saves[-1]]]),
    )
    return recorded_operators(int(count[0]))


def operators_around(
    graph: Graph, interval: Sequence[int], operations: Integers, saves: Integers
) -> Integers:
    """Return how many operators there are around some, and around some saves.

    Between the nearest boundaries, that is.

    Args:
        graph: The step.
        interval: The boundaries that they are between in any case.
        operations: The first ones, and the last ones.
        saves: The first ones, and the last ones.
    """
    first, last = interval
    places = graph.boundaries[first : last + 1]
    ran = np.array([place.operation for place in places])
    saved = np.array([place.saves for place in places])
    after_operations = np.searchsorted(ran, operations, side="right")
    after_saves = np.searchsorted(saved, saves, side="right")
    starts = np.minimum(after_operations[0], after_saves[0]) - 1
    stops = np.maximum(after_operations[1], after_saves[1])
    return ran[stops] - ran[starts]


@dataclass(frozen=True, slots=True)
class _Need:
    """The operators and the save that a region must contain."""

    first: int
    last: int
    save: int


def _may_be_narrowed(segment: Segment) -> bool:
    offloads = Action.OFFLOAD in segment.actions.values()
    return not segment.inner and not segment.by_call and not offloads


def _intervals(graph: Graph, segment: Segment) -> Iterator[tuple[int, int]]:
    """Yield the shortest interval for each save of what is recomputed."""
    places = graph.boundaries
    for need in _needs(graph, segment):
        start, stop = segment.start, segment.stop
        while (
            places[start + 1].operation <= need.first
            and places[start + 1].saves <= need.save
        ):
            start += 1
        while (
            places[stop - 1].operation > need.last
            and places[stop - 1].saves > need.save
        ):
            stop -= 1
        yield start, stop


def _needs(graph: Graph, segment: Segment) -> Iterator[_Need]:
    inside = graph.operations_between(segment.start, segment.stop)
    for save in _saves_of_recomputed(graph, segment):
        value = graph.claims[save].value
        operations, _ = replayed(graph, inside, [value], segment.actions)
        yield _Need(operations[0], operations[-1], save)


def _saves_of_recomputed(graph: Graph, segment: Segment) -> list[int]:
    """Return which saves in a segment are of values that it makes and does not hold."""
    claims, values, operations = graph.claims, graph.values, graph.operations
    first, last = graph.boundaries[segment.start], graph.boundaries[segment.stop]
    inside = range(first.operation, last.operation)
    return [
        save
        for save in range(first.saves, last.saves)
        if (value := claims[save].value) not in segment.actions
        and (producer := values[value].producer) in inside
        and operations[producer].replayable
    ]


def _touch(graph: Graph, stop: int, start: int) -> bool:
    """Return whether two intervals overlap, or are too near each other to be two."""
    places = graph.boundaries
    between = places[start].operation - places[stop].operation
    return start < stop or between <= _WORTH


def _part(graph: Graph, segment: Segment, start: int, stop: int) -> Segment:
    inside = graph.operations_between(start, stop)
    actions = {
        value: action
        for value, action in segment.actions.items()
        if graph.values[value].producer in inside
    }
    return Segment(start, stop, actions)


def without_idle_actions(graph: Graph, segment: Segment) -> Segment:
    """Return the segment without actions on values that nothing starts from.

    Neither backward nor a replay needs these, but a region would hold them. What the
    segment costs stays the same.

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
    """Return whether a segment runs nothing again and moves nothing to the host.

    Then it holds all that autograd would, for as long or longer, and records in vain.
    """
    inside = graph.operations_between(segment.start, segment.stop)
    if any(graph.values[one.value].producer in inside for one in graph.dropped):
        return False  # autograd would hold what nobody asks for
    found = footprint(graph, segment)
    return not found.replays and not found.offloads

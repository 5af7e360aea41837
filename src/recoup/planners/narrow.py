"""Narrow segments: around no more of forward than what is recomputed, and its use."""

from collections.abc import Iterator
from dataclasses import dataclass

from recoup.core.graph import Graph
from recoup.core.replays import replayed
from recoup.core.segments import REGION_OPERATORS, Action, Segment

_WORTH = 2 * REGION_OPERATORS
"""How many operators must lie between two segments, so that two cost less than one."""


def narrowed(graph: Graph, segment: Segment) -> tuple[Segment, ...]:
    """Return segments that recompute what one does, and record less of forward.

    A region has to see a value being made that it recomputes, and being saved. What
    lies before, after and between is kept there as it is without a region. Segments
    with others inside, or that move values elsewhere, stay as they are.

    Costs time in proportion to what is recomputed.

    Examples:
        >>> from recoup.core.graph import Boundary
        >>> places = (Boundary(0, 0), Boundary(0, 0))
        >>> narrowed(Graph((), 0, (), (), (), places, ()), Segment(0, 1))
        ()
    """
    if segment.inner or Action.OFFLOAD in segment.actions.values():
        return (segment,)
    stretches: list[tuple[int, int]] = []
    for start, stop in sorted(_stretches(graph, segment)):
        if stretches and _touch(graph, stretches[-1][1], start):
            before, until = stretches.pop()
            start, stop = before, max(until, stop)
        stretches.append((start, stop))
    return tuple(_part(graph, segment, *stretch) for stretch in stretches)


@dataclass(frozen=True, slots=True)
class _Need:
    """What a region must be around: some operators, and a save."""

    first: int
    last: int
    save: int


def _stretches(graph: Graph, segment: Segment) -> Iterator[tuple[int, int]]:
    """Yield the shortest stretch for each save of what is recomputed."""
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
    places, values = graph.boundaries, graph.values
    inside = graph.operations_between(segment.start, segment.stop)
    for save in range(places[segment.start].saves, places[segment.stop].saves):
        value = graph.claims[save].value
        if values[value].producer in inside:
            operations, _ = replayed(graph, inside, [value], segment.actions)
            if operations:
                yield _Need(operations[0], operations[-1], save)


def _touch(graph: Graph, stop: int, start: int) -> bool:
    """Return whether two stretches overlap, or are too near each other to be two."""
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

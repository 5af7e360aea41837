"""Segments and calls of the model: no region goes on from one call to the next."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from recoup.core.graph import Graph
from recoup.core.segments import Segment


def within_calls(graph: Graph, segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Return segments of which none goes over the end of a call of the model.

    One that does is parted; what lies between the calls is then in none.

    Examples:
        >>> from recoup.core.graph import Boundary
        >>> places = [Boundary(0, 0, model_call=n // 2) for n in range(4)]
        >>> graph = Graph((), 0, (), (), (), tuple(places), ())
        >>> [(s.start, s.stop) for s in within_calls(graph, [Segment(0, 3)])]
        [(0, 1), (2, 3)]
    """
    if graph.model_calls == 1:
        return tuple(segments)
    return tuple(part for segment in segments for part in _parts(graph, segment))


def _parts(graph: Graph, segment: Segment) -> Iterator[Segment]:
    inner = within_calls(graph, segment.inner)
    places = range(segment.start, segment.stop + 1)
    for _, group in groupby(places, key=lambda n: graph.boundaries[n].model_call):
        numbers = list(group)
        start, stop = numbers[0], numbers[-1]
        if start == stop:
            continue
        inside = graph.operations_between(start, stop)
        actions = {
            value: action
            for value, action in segment.actions.items()
            if graph.values[value].producer in inside
        }
        mine = tuple(s for s in inner if start <= s.start and s.stop <= stop)
        yield Segment(start, stop, actions, mine)

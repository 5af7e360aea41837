"""Segments: the decisions of a planner on an interval of forward."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby

from recoup.core.graph import Graph
from recoup.errors import UsageError

Interval = tuple[int, int]
"""Two boundaries, and the operations between."""

REGION_OPERATORS = 3
"""The cost of beginning and ending a region, in recorded operators."""

NESTED_OPERATORS = 2
"""The host time of recording an operator in a nested region, in operators recorded in
an outermost one: 1.4 on the CPU, 1.8 to 2.2 with an H200."""


class Action(Enum):
    """The action on a value that backward needs.

    A value without an action is recomputed.
    """

    KEEP = "keep"
    OFFLOAD = "offload"


@dataclass(frozen=True)
class Segment:
    """An interval of forward that runs as one region.

    Segments are nested or disjoint. Values outside all segments are kept, as by plain
    autograd.

    Attributes:
        start: The boundary where it begins.
        stop: The boundary where it ends.
        actions: The actions on values made in it; the others are recomputed.
        inner: Segments inside it, in order. It may drop the values that these hold.
        by_call: Whether it is one call of a block, recomputed by calling the block
            again; nothing is recorded. Such a segment is not nested.
    """

    start: int
    stop: int
    actions: Mapping[int, Action] = field(default_factory=dict[int, Action])
    inner: tuple["Segment", ...] = ()
    by_call: bool = False

    def __post_init__(self) -> None:
        check_order(self.inner, self.start, self.stop)


def check_order(segments: Sequence[Segment], start: int, stop: int) -> None:
    """Raise unless the segments are in order, disjoint, and between two boundaries.

    Raises:
        UsageError: They are not.
    """
    position = start
    for segment in segments:
        if not position <= segment.start < segment.stop <= stop:
            raise UsageError(
                f"expected segments in order between boundaries {start} and {stop}, "
                f"got one from {segment.start} to {segment.stop} after {position}."
            )
        position = segment.stop


def recorded_operators(count: int, depth: int = 0) -> int:
    """Return the cost of recording a region, in operators of an outermost one.

    Examples:
        >>> recorded_operators(10), recorded_operators(10, depth=1)
        (13, 26)
    """
    weight = NESTED_OPERATORS if depth else 1
    return weight * (count + REGION_OPERATORS)


def within_runs(graph: Graph, segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Return segments split where runs end, as between two calls of the model.

    Operations between the calls are then in no segment.

    Examples:
        >>> from recoup.core.graph import Boundary
        >>> places = [Boundary(0, 0, model_call=n // 2) for n in range(4)]
        >>> graph = Graph((), 0, (), (), (), tuple(places), ())
        >>> [(s.start, s.stop) for s in within_runs(graph, [Segment(0, 3)])]
        [(0, 1), (2, 3)]
    """
    if not any(graph.runs):  # all in run 0
        return tuple(segments)
    return tuple(part for segment in segments for part in _parts(graph, segment))


def _parts(graph: Graph, segment: Segment) -> Iterator[Segment]:
    if segment.by_call:
        yield segment
        return
    inner = within_runs(graph, segment.inner)
    intervals = range(segment.start, segment.stop)
    for run, group in groupby(intervals, key=graph.runs.__getitem__):
        numbers = list(group)
        start, stop = numbers[0], numbers[-1] + 1
        if run < 0:
            continue
        mine = tuple(s for s in inner if start <= s.start and s.stop <= stop)
        yield part_of(graph, segment, (start, stop), mine)


def part_of(
    graph: Graph, segment: Segment, interval: Interval, inner: tuple[Segment, ...] = ()
) -> Segment:
    """Return a segment on part of another, with its actions on values made there."""
    inside = graph.operations_between(*interval)
    actions = {
        value: action
        for value, action in segment.actions.items()
        if graph.values[value].producer in inside
    }
    return Segment(*interval, actions, inner)

"""Options to run one interval of forward, and their costs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from recoup.core.footprint import Footprint, footprint
from recoup.core.graph import Graph
from recoup.core.segments import Action, Interval, Segment
from recoup.core.trim_segments import recorded_narrowly


@dataclass(frozen=True)
class Option:
    """One option to run an interval of forward.

    Attributes:
        segments: Its segments; none: everything is kept.
        footprint: Their effect on memory and time.
        recorded: The number of recorded operators, for trimmed segments.
        recording_seconds: Time that this adds to forward.
    """

    segments: tuple[Segment, ...]
    footprint: Footprint
    recorded: int = 0
    recording_seconds: float = 0.0

    @cached_property
    def seconds(self) -> float:
        """The seconds of recomputing and recording."""
        replays = sum(replay.seconds for replay in self.footprint.replays)
        return replays + self.recording_seconds


def keep_all(graph: Graph, start: int, stop: int) -> Option:
    """Return the option without a segment."""
    total = Footprint()
    for save in graph.saves_between(start, stop):
        total.hold(graph, save)
    return Option((), total)


def with_actions(
    graph: Graph, start: int, stop: int, actions: Mapping[int, Action]
) -> Option:
    """Return the option to run an interval as one segment."""
    return nested(graph, Segment(start, stop, dict(actions)))


def holding(graph: Graph, start: int, stop: int, held: Iterable[int]) -> Option:
    """Return the option that holds some values and recomputes the others."""
    return with_actions(graph, start, stop, dict.fromkeys(held, Action.KEEP))


def nested(graph: Graph, segment: Segment) -> Option:
    """Return the option to run an interval as a segment with others inside."""
    found = footprint(graph, segment)
    recorded = recorded_narrowly(graph, segment, found)
    return Option((segment,), found, recorded, recorded * graph.recording_seconds)


def kept_around(graph: Graph, intervals: Iterable[Interval]) -> Footprint:
    """Return the footprint of values that autograd saves outside some intervals."""
    total = Footprint()
    position = 0
    for start, stop in intervals:
        for save in graph.saves[position : graph.boundaries[start].saves]:
            total.hold(graph, save)
        position = graph.boundaries[stop].saves
    for save in graph.saves[position:]:
        total.hold(graph, save)
    return total


def footprints_of(options: Iterable[Option]) -> list[Footprint]:
    """Return the footprints of options."""
    return [option.footprint for option in options]


def segments_of(options: Iterable[Option]) -> tuple[Segment, ...]:
    """Return the segments of options, in order."""
    return tuple(segment for option in options for segment in option.segments)

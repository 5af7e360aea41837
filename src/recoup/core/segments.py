"""Segments: what a planner decides about a stretch of forward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from recoup.errors import UsageError

REGION_OPERATORS = 3
"""How many recorded operators take the host as long as to begin and end a region."""

NESTED_OPERATORS = 2
"""How many recorded operators take the host as long as one that is recorded in a region
inside another: 1.4 on the CPU, 1.8 to 2.2 beside an H200."""


class Action(Enum):
    """What is done with a value that backward needs.

    A value without an action is recomputed.
    """

    KEEP = "keep"
    OFFLOAD = "offload"


@dataclass(frozen=True)
class Segment:
    """A stretch of forward that runs as one region.

    Segments are nested or disjoint. What is in no segment is kept, as plain autograd
    keeps it.

    Attributes:
        start: The boundary where it begins.
        stop: The boundary where it ends.
        actions: What is done with the values made in it; the others are recomputed.
        inner: Segments inside it, in order. What these hold, it may drop again.
    """

    start: int
    stop: int
    actions: Mapping[int, Action] = field(default_factory=dict[int, Action])
    inner: tuple["Segment", ...] = ()

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
                f"segments lie in order within boundaries {start} to {stop}: found "
                f"one from {segment.start} to {segment.stop} after {position}."
            )
        position = segment.stop


def recorded_operators(count: int, depth: int = 0) -> int:
    """Return how many operators take the host as long to record as one region's.

    Args:
        count: How many operators run in the region.
        depth: How many regions are around it.

    Examples:
        >>> recorded_operators(10), recorded_operators(10, depth=1)
        (13, 26)
    """
    weight = NESTED_OPERATORS if depth else 1
    return weight * (count + REGION_OPERATORS)

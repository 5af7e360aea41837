"""The result of a planner."""

from dataclasses import dataclass

from recoup.core.display import as_html
from recoup.core.segments import Segment
from recoup.core.simulation import Simulation
from recoup.core.units import print_bytes, print_seconds


@dataclass(frozen=True, repr=False)
class Solution:
    """A plan, its cost, and its optimality gap.

    Attributes:
        segments: The plan; with several passes, that of the one with the highest peak.
        simulation: Its cost in that pass.
        bound_seconds: A lower bound of recomputation and waiting for any plan that fits
            and keeps the order of forward's operators.
        planner: The algorithm that found it.
        seconds_planning: The time of the search.
        others: The plans of the other passes of the step.
    """

    segments: tuple[Segment, ...]
    simulation: Simulation
    bound_seconds: float = 0.0
    planner: str = ""
    seconds_planning: float = 0.0
    others: tuple["Solution", ...] = ()

    def __repr__(self) -> str:
        regions = sum(len(segments) for segments in self.plans)
        return (
            f"Solution({regions} regions: peak {print_bytes(self.peak_bytes)}, step "
            f"{print_seconds(self.seconds)}, of that added "
            f"{print_seconds(self.extra_seconds)}, at most {self.gap:.1%} above the "
            "optimum)"
        )

    def _repr_html_(self) -> str:
        passes = (each.simulation for each in self.passes)
        return as_html(repr(self), [n for each in passes for n in each.bytes_at])

    @property
    def passes(self) -> tuple["Solution", ...]:
        """The plans of all passes, in the order of `Graph.passes`."""
        return (self, *self.others)

    @property
    def plans(self) -> tuple[tuple[Segment, ...], ...]:
        """The segments of each pass."""
        return tuple(each.segments for each in self.passes)

    @property
    def peak_bytes(self) -> int:
        """The peak of the step over all passes."""
        return max(each.simulation.peak_bytes for each in self.passes)

    @property
    def seconds(self) -> float:
        """The time of the step, all passes together."""
        return sum(each.simulation.seconds for each in self.passes)

    @property
    def extra_seconds(self) -> float:
        """The time that the plan adds: replays, recording, waiting for copies."""
        return sum(each.simulation.extra_seconds for each in self.passes)

    @property
    def gap(self) -> float:
        """The largest possible speedup of the step, as a share of its time.

        Examples:
            >>> costs = Simulation(
            ...     (8,), (8,), (), 0, 0, stall_seconds=2.0, step_seconds=8.0
            ... )
            >>> Solution((), costs, bound_seconds=1.5).gap
            0.05
        """
        seconds = self.seconds
        if not seconds:
            return 0.0
        bound = sum(each.bound_seconds for each in self.passes)
        return max(0.0, self.extra_seconds - bound) / seconds

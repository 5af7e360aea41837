"""What a planner hands back."""

from dataclasses import dataclass

from recoup.core.segments import Segment
from recoup.core.simulation import Simulation


@dataclass(frozen=True)
class Solution:
    """A plan, what it costs, and how much better any other could be.

    Attributes:
        segments: The plan.
        simulation: What it costs.
        bound_seconds: No plan that fits and runs forward's operators in their order
            recomputes and waits for less than this, whatever its segments.
        planner: The algorithm that found it.
        seconds_planning: How long the search took.
    """

    segments: tuple[Segment, ...]
    simulation: Simulation
    bound_seconds: float = 0.0
    planner: str = ""
    seconds_planning: float = 0.0

    @property
    def extra_seconds(self) -> float:
        """What the plan adds to the step: replays, recording, waiting for copies."""
        return self.simulation.extra_seconds

    @property
    def gap(self) -> float:
        """By which part of its time the step could at best be shorter.

        Examples:
            >>> costs = Simulation(
            ...     (8,), (8,), (), 0, 0, stall_seconds=2.0, step_seconds=8.0
            ... )
            >>> Solution((), costs, bound_seconds=1.5).gap
            0.05
        """
        seconds = self.simulation.seconds
        if not seconds:
            return 0.0
        return max(0.0, self.extra_seconds - self.bound_seconds) / seconds

"""Findings: everything that a report shows, as plain immutable data."""

from dataclasses import dataclass

CATEGORIES = ("fixed", "held", "running", "replay")
"""What the bytes of a band are there for."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One band of a stacked timeline.

    Attributes:
        name: What the bytes are.
        category: One of `CATEGORIES`.
        bytes_at: How many there are in each column of the timeline.
    """

    name: str
    category: str
    bytes_at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The memory of one step, from its first operator to its last.

    Attributes:
        layers: The bands, from the lowest to the highest.
        moments: The moment that each column shows: of several that share a column, the
            one with most bytes.
        total_moments: How many moments the step has.
        forward_moments: How many of them are forward's.
        peak_bytes: The most bytes at any moment.
        peak_moment: The first moment with that many.
        peak_place: Where in the step that is, in words.
        alive: What the peak is made of, largest first: a name and bytes.
    """

    layers: tuple[Layer, ...]
    moments: tuple[int, ...]
    total_moments: int
    forward_moments: int
    peak_bytes: int
    peak_moment: int
    peak_place: str
    alive: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class BlockRow:
    """What a plan does in one block.

    Attributes:
        name: The block.
        operators: How many operators forward runs in it.
        saved_bytes: What plain autograd keeps of what is made in it.
        kept_bytes: What of that stays on the device.
        offloaded_bytes: What of that waits on the host.
        recomputed_bytes: What of that is computed again.
        replay_seconds: How long computing it again takes.
    """

    name: str
    operators: int
    saved_bytes: int
    kept_bytes: int
    offloaded_bytes: int
    recomputed_bytes: int
    replay_seconds: float

    @property
    def action(self) -> str:
        """What is done, in a word or two.

        Examples:
            >>> BlockRow("h.0", 9, 100, 100, 0, 0, 0.0).action
            'keep'
            >>> BlockRow("h.0", 9, 100, 30, 0, 70, 0.1).action
            'recompute 70%'
        """
        if not self.saved_bytes:
            return "nothing saved"
        parts = [
            (name, amount)
            for name, amount in (
                ("recompute", self.recomputed_bytes),
                ("offload", self.offloaded_bytes),
            )
            if amount
        ]
        if not parts:
            return "keep"
        if len(parts) == 1 and parts[0][1] == self.saved_bytes:
            return parts[0][0]
        return ", ".join(
            f"{name} {amount / self.saved_bytes:.0%}" for name, amount in parts
        )


@dataclass(frozen=True, slots=True)
class PlanView:
    """One plan, with what it costs by prediction.

    Attributes:
        name: What it is called.
        peak_bytes: Its peak.
        seconds: The time of a step.
        host_bytes: What is on the host between forward and backward.
        timeline: Its memory over the step.
        blocks: What it does in each block.
    """

    name: str
    peak_bytes: int
    seconds: float
    host_bytes: int
    timeline: Timeline
    blocks: tuple[BlockRow, ...]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A rule that people use, on the same step.

    Attributes:
        name: The rule.
        peak_bytes: Its peak, by prediction.
        seconds: The time of a step, by prediction.
    """

    name: str
    peak_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Entry:
    """What one contender costs, measured.

    Attributes:
        name: The contender.
        peak_bytes: The most bytes in use in a step; None: there is no such step.
        seconds: The least time of some steps; None: there is no such step.
        difference: How far its gradients are from the first contender's, at most; 0.0
            if they are the same bits. None: there are none to compare.
        failure: Why there is no such step; empty: there is.
    """

    name: str
    peak_bytes: int | None = None
    seconds: float | None = None
    difference: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found out about one step, and what was decided.

    Attributes:
        title: What was measured.
        budget_bytes: The budget; 0: none was named.
        plain_peak_bytes: The peak of the plain step, by prediction.
        plain_seconds: The time of the plain step, by prediction.
        floor_bytes: The smallest budget that can be met.
        measured_peak_bytes: The peak of a real step with the chosen plan; 0: none ran.
        measured_seconds: Its time; 0: none ran.
        plans: The plans from the smallest peak to the largest.
        chosen: Which of them is in force.
        baselines: Known rules on the same step.
        environment: Names and values: versions, device, date.
        estimated_for: The device that times were estimated for; empty: measured.
    """

    title: str
    budget_bytes: int
    plain_peak_bytes: int
    plain_seconds: float
    floor_bytes: int
    measured_peak_bytes: int
    measured_seconds: float
    plans: tuple[PlanView, ...]
    chosen: int
    baselines: tuple[Baseline, ...]
    environment: tuple[tuple[str, str], ...]
    estimated_for: str = ""

    @property
    def plan(self) -> PlanView:
        """The plan that is in force."""
        return self.plans[self.chosen]

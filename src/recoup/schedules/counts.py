"""Counts: what carrying a schedule out costs, in evaluations and states."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counts:
    """What a schedule costs.

    Attributes:
        steps: The steps of the loop.
        advances: Step evaluations without a tape.
        taped: Step evaluations with a tape: one for each step.
        peak_slots: The most states held at once, the one at the beginning included.
        peak_tape: The most steps on a tape at once.

    Examples:
        >>> counts = Counts(
        ...     steps=1000, advances=968, taped=1000, peak_slots=32, peak_tape=32
        ... )
        >>> counts.evaluations, counts.extra_per_step, counts.peak_states
        (1968, 0.968, 64)
    """

    steps: int
    advances: int
    taped: int
    peak_slots: int
    peak_tape: int

    @property
    def evaluations(self) -> int:
        """How often the step function is called in forward and backward together."""
        return self.advances + self.taped

    @property
    def extra_evaluations(self) -> int:
        """How often it is called beyond once a step."""
        return self.evaluations - self.steps

    @property
    def extra_per_step(self) -> float:
        """Extra evaluations a step."""
        return self.extra_evaluations / self.steps if self.steps else 0.0

    @property
    def peak_states(self) -> int:
        """Held states and taped states at the worst moment, an upper bound."""
        return self.peak_slots + self.peak_tape

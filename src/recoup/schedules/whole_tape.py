"""Store all: one tape of the whole loop, as plain backpropagation does."""

from collections.abc import Iterator
from dataclasses import dataclass

from recoup.schedules.actions import Action, Reverse
from recoup.schedules.counts import Counts
from recoup.schedules.schedule import require_at_least


@dataclass(frozen=True, slots=True)
class StoreAll:
    """Recompute nothing: the fewest evaluations, and memory for every step.

    Args:
        steps: How many steps the loop has.

    Examples:
        >>> StoreAll(1000).counts().evaluations
        1000
    """

    steps: int

    def __post_init__(self) -> None:
        require_at_least(0, steps=self.steps)

    def actions(self) -> Iterator[Action]:
        """Return the one action there is."""
        if self.steps:
            yield Reverse(0, self.steps)

    def counts(self) -> Counts:
        """Return what the schedule costs."""
        return Counts(
            steps=self.steps,
            advances=0,
            taped=self.steps,
            peak_slots=0,
            peak_tape=self.steps,
        )

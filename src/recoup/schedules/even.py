"""Even: snapshots at equal distances, or none: one segment on the tape at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from recoup.errors import UsageError
from recoup.schedules.schedule import (
    Action,
    Advance,
    Counts,
    Free,
    Restore,
    Reverse,
    Snapshot,
    require_at_least,
)


@dataclass(frozen=True, slots=True)
class Even:
    """Keep `checkpoints` states besides the first; replay each segment once.

    With the square root of the number of steps, memory grows like the square root and
    the loop is evaluated not quite twice.

    Args:
        steps: The number of steps of the loop.
        checkpoints: The number of states to keep, without the initial one.

    Examples:
        >>> counts = Even(1000, 31).counts()
        >>> counts.evaluations, counts.peak_slots, counts.peak_tape
        (1968, 32, 32)
    """

    steps: int
    checkpoints: int

    def __post_init__(self) -> None:
        require_at_least(0, steps=self.steps, checkpoints=self.checkpoints)

    def actions(self) -> Iterator[Action]:
        """Sweep forward once, then reverse segment by segment."""
        starts, stop = self._starts(), self.steps
        for slot, (start, end) in enumerate(pairwise(starts)):
            yield Snapshot(start, slot)
            yield Advance(start, end)
        last = len(starts) - 1
        for slot, start in reversed(list(enumerate(starts))):
            yield Snapshot(start, slot) if slot == last else Restore(start, slot)
            yield Reverse(start, stop)
            yield Free(slot)
            stop = start

    def counts(self) -> Counts:
        """Return the cost of the schedule."""
        starts = self._starts()
        if not starts:
            return Counts(steps=0, advances=0, taped=0, peak_slots=0, peak_tape=0)
        return Counts(
            steps=self.steps,
            advances=starts[-1],
            taped=self.steps,
            peak_slots=len(starts),
            peak_tape=max(b - a for a, b in pairwise([*starts, self.steps])),
        )

    def _starts(self) -> list[int]:
        if self.steps == 0:
            return []
        return sorted({0, *compute_checkpoint_positions(self.steps, self.checkpoints)})


def compute_checkpoint_positions(seq_length: int, num_checkpoints: int) -> list[int]:
    """Return Tangent's positions of checkpoints: at equal distances, rounded down.

    The state before step `p` is the one after `p` steps. The initial state is kept as
    well, unless it is among the positions. For the positions of a binomial schedule use
    `recoup.schedules.positions(Revolve(...))`.

    Args:
        seq_length: The number of steps of the loop.
        num_checkpoints: The number of states to keep. From `seq_length` on, all.

    Raises:
        UsageError: An argument is negative.

    Examples:
        >>> compute_checkpoint_positions(1000, 31)[:4]
        [31, 62, 93, 124]
        >>> compute_checkpoint_positions(10, 3)
        [2, 4, 7]
    """
    if seq_length < 0 or num_checkpoints < 0:
        raise UsageError(
            "expected 0 or more steps and checkpoints, got seq_length="
            f"{seq_length} and num_checkpoints={num_checkpoints}."
        )
    if num_checkpoints >= seq_length:
        return list(range(seq_length))
    found: list[int] = []
    position = 0
    for left in range(num_checkpoints + 1, 1, -1):
        position += (seq_length - position) // left
        found.append(position)
    return found


@dataclass(frozen=True, slots=True)
class StoreAll:
    """Recompute nothing: the fewest evaluations, and memory for every step.

    Args:
        steps: The number of steps of the loop.

    Examples:
        >>> StoreAll(1000).counts().evaluations
        1000
    """

    steps: int

    def __post_init__(self) -> None:
        require_at_least(0, steps=self.steps)

    def actions(self) -> Iterator[Action]:
        """Return the only action."""
        if self.steps:
            yield Reverse(0, self.steps)

    def counts(self) -> Counts:
        """Return the cost of the schedule."""
        return Counts(
            steps=self.steps,
            advances=0,
            taped=self.steps,
            peak_slots=0,
            peak_tape=self.steps,
        )

"""Plans: what a loop is asked to do, decided before it runs."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from recoup.errors import UsageError
from recoup.schedules.even import Even, StoreAll
from recoup.schedules.online import Online
from recoup.schedules.schedule import Action, Schedule


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """How one loop is carried out.

    Attributes:
        schedule: For a loop of known length.
        online: For a loop that ends by a condition.
        condition: Says whether another step is to be run.
        most_steps: Where a loop with a condition ends at the latest.
        shows_beginning: The state at the beginning is among the checkpoints.
        verify: Which states are recognised in backward: "first", "always", "off".
        tolerance: The difference allowed there; None for equal bits.
        stores: The tiers where states are held, for torch.
    """

    schedule: Schedule | None = None
    online: Online | None = None
    condition: Callable[[Any], Any] | None = None
    most_steps: int | None = None
    shows_beginning: bool = False
    verify: str = "first"
    tolerance: float | None = None
    stores: tuple[Any, ...] = ()

    def actions(self, steps: int) -> Iterator[Action]:
        """Return the actions of the whole loop, once its length is known."""
        if self.schedule is not None:
            return self.schedule.actions()
        assert self.online is not None, "one of the two is set"
        return self.online.actions(steps)


def default_checkpoints(steps: int) -> int:
    """Return the seed's number of checkpoints: the square root, rounded down.

    Examples:
        >>> [default_checkpoints(n) for n in (100, 500, 1000, 5000)]
        [10, 22, 31, 70]
    """
    return math.isqrt(steps)


def known_length(
    steps: int, num_checkpoints: int | None, schedule: Schedule | None
) -> tuple[Schedule, bool]:
    """Return the schedule for a loop of known length, and if it shows the beginning."""
    if schedule is None:
        wanted = num_checkpoints
        count = default_checkpoints(steps) if wanted is None else wanted
        if count < 0:
            raise UsageError(
                f"a loop holds no negative number of checkpoints: got {count}. Give 0 "
                "or more, or None for the square root of the number of steps."
            )
        found = Even(steps, count) if count else StoreAll(steps)
        return found, 0 < steps <= count
    if num_checkpoints is not None:
        raise UsageError(
            "a loop takes num_checkpoints or a schedule: got both. A schedule knows "
            "how many states it holds; leave num_checkpoints out."
        )
    if schedule.steps != steps:
        raise UsageError(
            f"the schedule is for {schedule.steps} steps, but the loop has {steps}. "
            "Make it for as many steps as the loop has."
        )
    return schedule, False


def checked_verification(verify: str, tolerance: float | None) -> None:
    """Raise `UsageError` if these do not say how to verify."""
    if verify not in ("first", "always", "off"):
        raise UsageError(
            f'verify= is "first", "always" or "off": got {verify!r}. Choose one.'
        )
    if tolerance is not None and not tolerance >= 0:
        raise UsageError(
            f"tolerance= is a difference to allow, 0 or more, or None for equal bits: "
            f"got {tolerance!r}."
        )

"""Schedule: what every way to checkpoint a loop offers."""

from collections.abc import Iterator
from typing import Protocol

from recoup.errors import UsageError
from recoup.schedules.actions import Action, Reverse, Snapshot
from recoup.schedules.counts import Counts


class Schedule(Protocol):
    """A plan for a loop of known length, made without running it."""

    @property
    def steps(self) -> int:
        """How many steps the loop has."""
        ...

    def actions(self) -> Iterator[Action]:
        """Return what to do, in order; everything up to the first reverse is forward.

        The actions are made one by one, so a pause between forward and backward costs
        nothing, and nothing grows with the number of steps.
        """
        ...

    def counts(self) -> Counts:
        """Return what the schedule costs, by a formula."""
        ...


def positions(schedule: Schedule) -> list[int]:
    """Return where the first sweep takes snapshots, the beginning left out.

    Examples:
        >>> from recoup.schedules.revolve import Revolve
        >>> positions(Revolve(100, slots=5))
        [56, 80, 90, 96]
    """
    found: list[int] = []
    for action in schedule.actions():
        if isinstance(action, Reverse):
            break
        if isinstance(action, Snapshot) and action.step > 0:
            found.append(action.step)
    return found


def require_at_least(least: int, **amounts: int) -> None:
    """Raise `UsageError` if an amount is below what makes sense."""
    for name, amount in amounts.items():
        if amount < least:
            raise UsageError(
                f"a schedule needs {name} >= {least}: got {amount}. Give at least "
                f"{least}."
            )

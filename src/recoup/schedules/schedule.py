"""Schedules: their actions as plain integers, their costs, and their protocol."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from recoup.errors import UsageError


@dataclass(frozen=True, slots=True)
class Advance:
    """Run the steps from `start` up to `stop` without a tape.

    The current state is the one before `start`; afterwards it is the one before `stop`.
    """

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Keep the current state, the one before `step`, in `slot`.

    `tier` is 0 for the fastest place to keep it, 1 for the next, and so on.
    """

    step: int
    slot: int
    tier: int = 0


@dataclass(frozen=True, slots=True)
class Restore:
    """Make the state in `slot`, the one before `step`, the current one."""

    step: int
    slot: int


@dataclass(frozen=True, slots=True)
class Reverse:
    """Run the steps from `start` up to `stop` with a tape and pull the cotangent back.

    The current state is the one before `start`. Afterwards there is no current state,
    and the cotangent is that of the state before `start`.
    """

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Free:
    """Drop the state in `slot`."""

    slot: int


Action = Advance | Snapshot | Restore | Reverse | Free


@dataclass(frozen=True, slots=True)
class Counts:
    """The cost of a schedule.

    Attributes:
        steps: The steps of the loop.
        advances: Step evaluations without a tape.
        taped: Step evaluations with a tape: one for each step.
        peak_slots: The maximum number of states held, including the initial one.
        peak_tape: The maximum number of steps on a tape.

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
        """The number of calls of the step function in forward and backward."""
        return self.advances + self.taped

    @property
    def extra_evaluations(self) -> int:
        """The number of calls beyond one per step."""
        return self.evaluations - self.steps

    @property
    def extra_per_step(self) -> float:
        """Extra evaluations per step."""
        return self.extra_evaluations / self.steps if self.steps else 0.0

    @property
    def peak_states(self) -> int:
        """An upper bound of held and taped states at a time."""
        return self.peak_slots + self.peak_tape


class Schedule(Protocol):
    """A plan for a loop of known length, made without running it."""

    @property
    def steps(self) -> int:
        """The number of steps of the loop."""
        ...

    def actions(self) -> Iterator[Action]:
        """Return the actions, in order; those up to the first reverse are forward.

        The actions are generated one by one, so a pause between forward and backward
        costs nothing, and nothing grows with the number of steps.
        """
        ...

    def counts(self) -> Counts:
        """Return the cost of the schedule, by a formula."""
        ...


def positions(schedule: Schedule) -> list[int]:
    """Return the positions of snapshots of the first sweep, without the initial state.

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
    """Raise `UsageError` if an amount is below its minimum."""
    for name, amount in amounts.items():
        if amount < least:
            raise UsageError(f"expected {name} of at least {least}, got {amount}.")

"""Interpreter: the definition of a valid schedule, its counts, and its drawing."""

from collections.abc import Iterable
from typing import assert_never

from recoup.errors import ScheduleError
from recoup.schedules.schedule import (
    Action,
    Advance,
    Counts,
    Free,
    Restore,
    Reverse,
    Snapshot,
)


def interpret(actions: Iterable[Action], steps: int) -> Counts:
    """Simulate a schedule and return its cost.

    A schedule is valid when every action finds the state it needs, no slot is
    overwritten or freed twice, the steps are reversed from the last to the first
    without gap or overlap, and nothing is held at the end.

    Costs a few operations per action; holds one integer for each slot in use.

    Args:
        actions: The actions of the schedule, in order.
        steps: The number of steps of the loop.

    Raises:
        ScheduleError: Names the first invalid action, and why it is invalid.

    Examples:
        >>> from recoup.schedules.revolve import Revolve
        >>> schedule = Revolve(1000, slots=10)
        >>> interpret(schedule.actions(), 1000) == schedule.counts()
        True
    """
    machine = _Machine(steps)
    for action in actions:
        machine.do(action)
    machine.finish()
    return Counts(
        steps=steps,
        advances=machine.advances,
        taped=machine.taped,
        peak_slots=machine.peak_slots,
        peak_tape=machine.peak_tape,
    )


class _Machine:
    """A loop that consists of positions only."""

    def __init__(self, steps: int) -> None:
        self.advances = 0
        self.taped = 0
        self.peak_slots = 0
        self.peak_tape = 0
        self._held: dict[int, int] = {}
        self._current: int | None = 0
        self._end = steps

    def do(self, action: Action) -> None:
        match action:
            case Advance(start, stop):
                self._require(start < stop <= self._end, action, "no such steps")
                self._require_current(start, action)
                self.advances += stop - start
                self._current = stop
            case Snapshot(step, slot):
                self._require_current(step, action)
                self._require(slot not in self._held, action, "the slot is in use")
                self._held[slot] = step
                self.peak_slots = max(self.peak_slots, len(self._held))
            case Restore(step, slot):
                found = self._held.get(slot)
                self._require(found == step, action, f"the slot holds {found}")
                self._current = step
            case Reverse(start, stop):
                self._require(
                    start < stop == self._end, action, f"the end is at {self._end}"
                )
                self._require_current(start, action)
                self.taped += stop - start
                self.peak_tape = max(self.peak_tape, stop - start)
                self._end = start
                self._current = None
            case Free(slot):
                self._require(slot in self._held, action, "the slot is empty")
                del self._held[slot]
            case _:
                assert_never(action)

    def finish(self) -> None:
        if self._end > 0:
            raise ScheduleError(
                f"expected a schedule that reverses every step, got one that ends "
                f"before step {self._end - 1} is reversed."
            )
        if self._held:
            raise ScheduleError(
                f"expected a schedule that frees all slots, got one that ends with "
                f"slots {sorted(self._held)} in use."
            )

    def _require_current(self, step: int, action: Action) -> None:
        self._require(
            self._current == step, action, f"the current state is {self._current}"
        )

    def _require(self, holds: bool, action: Action, found: str) -> None:  # noqa: FBT001
        if not holds:
            raise ScheduleError(
                f"{action} cannot be carried out: {found}; correct the schedule."
            )


def draw(actions: Iterable[Action], steps: int) -> str:
    """Return a drawing of a schedule: steps from left to right, time downwards.

    `o` is a step before which a state is kept, `>` one that runs without a tape, `#`
    one that runs with a tape and is reversed, `|` a state that is held meanwhile.

    Examples:
        >>> from recoup.schedules.revolve import Revolve
        >>> print(draw(Revolve(6, slots=2).actions(), 6))
        o>>o>#
        |  o#
        |  #
        oo#
        |#
        #
    """
    held: dict[int, int] = {}
    lines: list[str] = []
    line = [" "] * steps
    for action in actions:
        match action:
            case Advance(start, stop):
                for step in range(start, stop):
                    line[step] = "o" if line[step] == "o" else ">"
            case Snapshot(step, slot):
                held[slot] = step
                line[step] = "o"
            case Restore(step):
                line = [" "] * steps
                for other in held.values():
                    line[other] = "|"
                line[step] = "o"
            case Reverse(start, stop):
                line[start:stop] = "#" * (stop - start)
                lines.append("".join(line).rstrip())
            case Free(slot):
                del held[slot]
    return "\n".join(lines)

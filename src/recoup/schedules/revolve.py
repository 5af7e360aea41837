"""Revolve: the provably fewest evaluations for a number of slots."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recoup.schedules.actions import (
    Action,
    Advance,
    Free,
    Restore,
    Reverse,
    Snapshot,
)
from recoup.schedules.binomial import fewest_advances, first_cut, first_step_advances
from recoup.schedules.counts import Counts
from recoup.schedules.schedule import require_at_least


@dataclass(frozen=True, slots=True)
class Revolve:
    """Reverse a loop with `slots` states and the tape of one step.

    No schedule that keeps as many states and tapes one step at a time evaluates fewer
    steps (Griewank and Walther, 2000). Needs no table: each action is made in a few
    integer operations, and memory grows with the slots alone.

    Args:
        steps: How many steps the loop has.
        slots: States to hold at once, the one at the beginning included.

    Examples:
        >>> Revolve(1000, slots=10).counts().evaluations
        4636
        >>> for action in Revolve(3, slots=2).actions():
        ...     print(action)
        Snapshot(step=0, slot=0, tier=0)
        Advance(start=0, stop=1)
        Snapshot(step=1, slot=1, tier=0)
        Advance(start=1, stop=2)
        Reverse(start=2, stop=3)
        Restore(step=1, slot=1)
        Reverse(start=1, stop=2)
        Free(slot=1)
        Restore(step=0, slot=0)
        Reverse(start=0, stop=1)
        Free(slot=0)
    """

    steps: int
    slots: int

    def __post_init__(self) -> None:
        require_at_least(0, steps=self.steps)
        require_at_least(1, slots=self.slots)

    def actions(self) -> Iterator[Action]:
        """Return what to do, in order."""
        return Chunked(self.steps, slots=self.slots, chunk=1).actions()

    def counts(self) -> Counts:
        """Return what the schedule costs, by the closed formula."""
        return Chunked(self.steps, slots=self.slots, chunk=1).counts()


@dataclass(frozen=True, slots=True)
class Chunked:
    """Reverse a loop with `slots` states and the tape of `chunk` steps at once.

    Revolve on chunks. One chunk for the whole loop is plain backpropagation, chunks of
    a step are Revolve, and the square-root rule lies between. Taping several steps at
    once pays because every pull through a tape has a price of its own. The first chunk
    is the shorter one if they do not divide the loop.

    Args:
        steps: How many steps the loop has.
        slots: States to hold at once, the one at the beginning included.
        chunk: Steps to tape at once.

    Examples:
        >>> Chunked(1000, slots=10, chunk=20).counts().evaluations
        2760
    """

    steps: int
    slots: int
    chunk: int

    def __post_init__(self) -> None:
        require_at_least(0, steps=self.steps)
        require_at_least(1, slots=self.slots, chunk=self.chunk)

    def actions(self) -> Iterator[Action]:
        """Return what to do, in order."""
        return _stretch_actions(self.steps, self.slots, self.chunk)

    def counts(self) -> Counts:
        """Return what the schedule costs, by the closed formula."""
        chunks = -(-self.steps // self.chunk)
        missing = chunks * self.chunk - self.steps
        return Counts(
            steps=self.steps,
            advances=self.chunk * fewest_advances(chunks, self.slots)
            - missing * first_step_advances(chunks, self.slots),
            taped=self.steps,
            peak_slots=min(self.slots, max(chunks - 1, 1)) if chunks else 0,
            peak_tape=min(self.chunk, self.steps),
        )


def stretch_actions(start: int, stop: int, *, slots: Sequence[int]) -> Iterator[Action]:
    """Reverse part of a loop by Revolve, from a state that the first slot holds.

    Args:
        start: The first step of the part.
        stop: The step after its last.
        slots: The slots that may be used; the first is freed at the end.
    """
    actions = _stretch_actions(stop - start, len(slots), 1)
    next(actions)  # the snapshot of the beginning, which is there
    yield Restore(start, slots[0])
    for action in actions:
        yield _moved(action, start, slots)


def _stretch_actions(steps: int, slots: int, chunk: int) -> Iterator[Action]:
    """Reverse `steps` steps by Revolve on chunks; the first chunk may be shorter."""
    if steps == 0:
        return
    end = -(-steps // chunk)
    before_first = steps - end * chunk  # where a full first chunk would begin
    held = [0]
    current, step = 0, 0
    yield Snapshot(0, 0)
    while True:
        while end - current > 1:
            current += first_cut(end - current, slots - len(held) + 1)
            start, step = step, before_first + current * chunk
            yield Advance(start, step)
            if end - current > 1:
                yield Snapshot(step, len(held))
                held.append(current)
        yield Reverse(step, before_first + end * chunk)
        end = current
        if held[-1] == end:
            held.pop()
            yield Free(len(held))
        if not held:
            return
        current = held[-1]
        step = max(before_first + current * chunk, 0)
        yield Restore(step, len(held) - 1)


def _moved(action: Action, steps: int, slots: Sequence[int]) -> Action:
    match action:
        case Advance(start, stop):
            return Advance(start + steps, stop + steps)
        case Reverse(start, stop):
            return Reverse(start + steps, stop + steps)
        case Snapshot(step, slot):
            return Snapshot(step + steps, slots[slot])
        case Restore(step, slot):
            return Restore(step + steps, slots[slot])
        case Free(slot):
            return Free(slots[slot])

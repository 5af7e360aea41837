"""Revolve: the provably fewest evaluations for a number of slots, in several tiers.

By the binomial formulas of A. Griewank and A. Walther, Algorithm 799: Revolve, ACM
Transactions on Mathematical Software 26 (2000). Slots include the initial state.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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


def repetitions(steps: int, slots: int) -> tuple[int, int]:
    """Return the least `t` with C(slots + t, t) >= steps, and that binomial.

    `t` is the maximum number of advances of a step in an optimal schedule.

    Costs about `t` multiplications.

    Examples:
        >>> repetitions(1000, 10)  # C(14, 4) = 1001
        (4, 1001)
    """
    times, reach = 0, 1
    while reach < steps:
        times += 1
        reach = reach * (slots + times) // times
    return times, reach


def fewest_advances(steps: int, slots: int) -> int:
    """Return the least number of untaped step evaluations that can reverse a loop.

    The first sweep is included, except its last step, which is taped right away.

    Examples:
        >>> fewest_advances(10, 3), fewest_advances(1000, 10)
        (15, 3636)
    """
    if steps <= 1:
        return 0
    slots = min(slots, steps - 1)
    if slots == 1:
        return steps * (steps - 1) // 2
    times, reach = repetitions(steps, slots)
    # C(slots + times, times - 1) = C(slots + times, times) * times / (slots + 1)
    return times * steps - reach * times // (slots + 1)


def first_cut(steps: int, slots: int) -> int:
    """Return the distance to the next snapshot: the farthest optimal choice.

    Examples:
        >>> first_cut(1000, 10)
        286
    """
    if slots == 1:
        return steps - 1
    if slots >= steps - 1:
        return 1
    times, reach = repetitions(steps, slots)
    one_less = reach * times // (slots + times)  # C(slots + times - 1, times - 1)
    two_less = one_less * (times - 1) // (slots + times - 1)
    return min(one_less, steps - (one_less - two_less))


def first_step_advances(steps: int, slots: int) -> int:
    """Return how often a schedule that cuts at `first_cut` advances its first step.

    Examples:
        >>> first_step_advances(1000, 10)
        4
    """
    count = 0
    while steps > 1:
        if slots == 1:
            return count + steps - 1
        steps = first_cut(steps, slots)
        count += 1
    return count


@dataclass(frozen=True, slots=True)
class Chunked:
    """Reverse a loop with `slots` states and a tape of `chunk` steps.

    Revolve on chunks. One chunk for the whole loop is plain backpropagation, chunks of
    one step are Revolve, and the square-root rule is in between. Taping several steps
    together pays because every pull through a tape has a fixed cost. The first chunk is
    the shorter one if they do not divide the loop.

    Args:
        steps: The number of steps of the loop.
        slots: The number of states to hold at a time, including the initial one.
        chunk: The number of steps per tape.

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
        """Return the actions, in order."""
        return _interval_actions(self.steps, self.slots, self.chunk)

    def counts(self) -> Counts:
        """Return the cost of the schedule, by the closed formula."""
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


@dataclass(frozen=True, slots=True)
class Revolve(Chunked):
    """Reverse a loop with `slots` states and the tape of one step.

    No schedule that keeps as many states and tapes one step at a time evaluates fewer
    steps (Griewank and Walther, 2000). Needs no table: each action takes a few integer
    operations, and memory grows only with the slots.

    Args:
        steps: The number of steps of the loop.
        slots: The number of states to hold at a time, including the initial one.

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

    chunk: int = field(default=1, init=False, repr=False)


def interval_actions(
    start: int, stop: int, *, slots: Sequence[int]
) -> Iterator[Action]:
    """Reverse part of a loop by Revolve, from a state in the first slot."""
    actions = _interval_actions(stop - start, len(slots), 1)
    next(actions)  # the snapshot of the initial state, which exists
    yield Restore(start, slots[0])
    for action in actions:
        yield _moved(action, start, slots)


def _interval_actions(steps: int, slots: int, chunk: int) -> Iterator[Action]:
    """Reverse `steps` steps by Revolve on chunks; the first chunk may be shorter."""
    if steps == 0:
        return
    end = -(-steps // chunk)
    before_first = steps - end * chunk  # the start of a full first chunk
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


@dataclass(frozen=True, slots=True)
class Multistage:
    """Reverse a loop with slots in several tiers, such as device, host and disk.

    The actions are those of `Chunked` with all slots together, so the evaluations are
    minimal. Writes and reads of every slot are counted beforehand, and the most used
    slots go to the first tier (P. Stumm and A. Walther, MultiStage approaches for
    optimal offline checkpointing, SIAM Journal on Scientific Computing 31, 2009).

    Args:
        steps: The number of steps of the loop.
        tier_slots: The number of slots of each tier, the fastest first. The initial
            state takes one.
        chunk: The number of steps per tape.

    Examples:
        >>> schedule = Multistage(1000, tier_slots=(3, 7))
        >>> schedule.tiers()  # the tier of each slot; the beginning is in the last
        (1, 1, 1, 1, 1, 1, 1, 0, 0, 0)
        >>> schedule.counts().evaluations
        4636
    """

    steps: int
    tier_slots: tuple[int, ...]
    chunk: int = 1

    def __post_init__(self) -> None:
        require_at_least(0, steps=self.steps)
        require_at_least(1, slots=sum(self.tier_slots), chunk=self.chunk)
        if any(slots < 0 for slots in self.tier_slots):
            raise UsageError(
                f"expected 0 or more slots for each tier, got {self.tier_slots}; give "
                "0 for a tier that is not used."
            )

    def tiers(self) -> tuple[int, ...]:
        """Return the tier of every slot.

        Costs one pass over the actions, which is as long as the schedule.
        """
        uses = self._uses()
        busiest = sorted(range(sum(self.tier_slots)), key=lambda slot: -uses[slot])
        places = [tier for tier, n in enumerate(self.tier_slots) for _ in range(n)]
        found = dict(zip(busiest, places, strict=True))
        return tuple(found[slot] for slot in range(len(found)))

    def transfers(self) -> tuple[int, ...]:
        """Return the number of states written to and read from each tier."""
        uses = self._uses()
        moved = [0] * len(self.tier_slots)
        for slot, tier in enumerate(self.tiers()):
            moved[tier] += uses[slot]
        return tuple(moved)

    def actions(self) -> Iterator[Action]:
        """Return the actions, in order; snapshots name their tier."""
        tiers = self.tiers()
        for action in self._plain().actions():
            if isinstance(action, Snapshot):
                yield Snapshot(action.step, action.slot, tiers[action.slot])
            else:
                yield action

    def counts(self) -> Counts:
        """Return the cost of the schedule."""
        return self._plain().counts()

    def _plain(self) -> Chunked:
        return Chunked(self.steps, slots=sum(self.tier_slots), chunk=self.chunk)

    def _uses(self) -> Counter[int]:
        return Counter(
            action.slot
            for action in self._plain().actions()
            if isinstance(action, (Snapshot, Restore))
        )

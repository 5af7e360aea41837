"""Drive: the plan of a loop, the slots of its states, and a backend that runs it."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from recoup.errors import UsageError
from recoup.schedules.even import Even, StoreAll
from recoup.schedules.online import Online
from recoup.schedules.schedule import (
    Action,
    Advance,
    Free,
    Restore,
    Reverse,
    Schedule,
    Snapshot,
)


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


@dataclass(frozen=True, slots=True)
class KeptState:
    """A state in a slot: the step it comes before, and what the backend made of it."""

    step: int
    held: Any
    owned: bool = True

    def drop(self) -> None:
        """Let a tier forget it, if it is in one and these slots put it there."""
        if self.owned and hasattr(self.held, "drop"):
            self.held.drop()


class Slots:
    """The states that a schedule holds now, by slot."""

    def __init__(self, kept: Mapping[int, KeptState] | None = None) -> None:
        self._kept: dict[int, KeptState] = dict(kept or {})

    def put(self, slot: int, step: int, held: Any) -> None:
        """Keep a state."""
        self._kept[slot] = KeptState(step, held)

    def get(self, slot: int) -> Any:
        """Return the state in a slot."""
        return self._kept[slot].held

    def prefetch(self, slot: int) -> None:
        """Begin to bring a state back, if it is in a tier where that takes time."""
        kept = self._kept.get(slot)
        if kept is not None and hasattr(kept.held, "prefetch"):
            kept.held.prefetch()

    def free(self, slot: int) -> None:
        """Forget a state."""
        self._kept.pop(slot).drop()

    def clear(self) -> None:
        """Forget all."""
        for slot in list(self._kept):
            self.free(slot)

    def copy(self) -> "Slots":
        """Return other slots that hold the same states, and leave them to these."""
        return Slots({slot: replace(k, owned=False) for slot, k in self._kept.items()})

    def by_step(self) -> dict[int, Any]:
        """Return what is held, by the step it comes before, in order."""
        found = {kept.step: kept.held for kept in self._kept.values()}
        return dict(sorted(found.items()))

    def __len__(self) -> int:
        return len(self._kept)


class Checkpoints(Mapping[int, Any]):
    """The states that a loop holds, by position: the state after so many steps.

    It reads like the dictionary of the seed's guide. The state at the beginning is held
    besides and not among them. Backward frees the states as it uses them, so that a
    variable that still names the checkpoints does not keep memory.

    They are values: no gradient passes through them. What a loss needs besides the
    final state is an output of the steps (`with_outputs`).
    """

    def __init__(
        self,
        slots: Slots,
        take: Callable[[Any], Any],
        pull_back: Callable[..., Any],
        *,
        hidden: int | None = 0,
    ) -> None:
        self._slots = slots
        self._take = take
        self._pull_back = pull_back
        self._hidden = hidden

    def __getitem__(self, position: int) -> Any:
        return self._take(self._shown()[position])

    def __iter__(self) -> Iterator[int]:
        return iter(self._shown())

    def __len__(self) -> int:
        return len(self._shown())

    def __repr__(self) -> str:
        return f"Checkpoints(positions={list(self)})"

    def pull(self, cotangent: Any) -> Any:
        """Return the gradient of the initial state for a cotangent of the final one.

        The states stay as they are, so it can be called again.

        Costs what the loop's backward costs.
        """
        return self._pull_back(cotangent)

    def _shown(self) -> dict[int, Any]:
        held = self._slots.by_step()
        return {step: kept for step, kept in held.items() if step != self._hidden}


class Machine(Protocol):
    """What a backend does with states."""

    def hold(self, state: Any, step: int, tier: int) -> Any:
        """Return what keeps the state before `step`."""
        ...

    def take(self, held: Any) -> Any:
        """Return the state that is held."""
        ...

    def advance(self, state: Any, start: int, stop: int) -> Any:
        """Run steps without a tape."""
        ...

    def reverse(self, state: Any, start: int, stop: int) -> None:
        """Run steps with a tape and pull the cotangent back through them."""
        ...


def forward(
    actions: Iterator[Action], machine: Machine, slots: Slots, state: Any
) -> tuple[Any, Reverse | None]:
    """Carry out everything up to the first reverse, which is left to the caller.

    Returns:
        The state before that reverse, and the reverse; None for a loop without steps.
    """
    for action in actions:
        if isinstance(action, Reverse):
            return state, action
        state = _do(action, machine, slots, state)
    return state, None


def backward(
    actions: Iterable[Action], machine: Machine, slots: Slots, *, ahead: bool = False
) -> None:
    """Carry out the rest.

    With `ahead`, a tier begins to bring the next state back while steps are reversed.
    """
    state = None
    for action in _prefetching(actions, slots) if ahead else actions:
        state = _do(action, machine, slots, state)


def after_first_reverse(make: Callable[[], Iterator[Action]]) -> Iterator[Action]:
    """Return the actions behind the first reverse, which `forward` leaves out."""
    actions = make()
    for action in actions:
        if isinstance(action, Reverse):
            break
    return actions


def run_to_condition(
    plan: LoopPlan, machine: Machine, slots: Slots, state: Any
) -> tuple[Any, int, Callable[[], Iterator[Action]]]:
    """Run a loop of unknown length.

    Returns:
        The final state, the number of steps, and what makes the actions of backward.
    """
    assert plan.online is not None, "no schedule, so an online one"
    assert plan.condition is not None, "an online schedule needs it"
    placement = plan.online.begin()
    index = 0
    while index != plan.most_steps and bool(plan.condition(state)):
        state, _ = forward(placement.reach(index), machine, slots, state)
        state = machine.advance(state, index, index + 1)
        index += 1
    return state, index, partial(placement.reversal, index)


def _prefetching(actions: Iterable[Action], slots: Slots) -> Iterator[Action]:
    rest = iter(actions)
    waiting: deque[Action] = deque()
    while action := (waiting.popleft() if waiting else next(rest, None)):
        if isinstance(action, Reverse):
            _look_ahead(rest, waiting, slots)
        yield action


def _look_ahead(rest: Iterator[Action], waiting: deque[Action], slots: Slots) -> None:
    for action in rest:
        waiting.append(action)
        if isinstance(action, Restore):
            slots.prefetch(action.slot)
        if not isinstance(action, Free):
            return


def _do(action: Action, machine: Machine, slots: Slots, state: Any) -> Any:
    # Not by patterns: those cost as much as a small operator.
    if isinstance(action, Advance):
        return machine.advance(state, action.start, action.stop)
    if isinstance(action, Reverse):
        machine.reverse(state, action.start, action.stop)
        return None
    if isinstance(action, Restore):
        return machine.take(slots.get(action.slot))
    if isinstance(action, Snapshot):
        held = machine.hold(state, action.step, action.tier)
        slots.put(action.slot, action.step, held)
        return state
    slots.free(action.slot)
    return state

"""Drive: carry out a schedule's actions with a backend's four operations."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

from recoup.loops.loop_plan import LoopPlan
from recoup.loops.slots import Slots
from recoup.schedules.schedule import Action, Advance, Free, Restore, Reverse, Snapshot


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

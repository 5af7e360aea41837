"""Drive: carry out a schedule's actions with a backend's four operations."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, assert_never

from recoup.loops.slots import Slots
from recoup.schedules.actions import (
    Action,
    Advance,
    Free,
    Restore,
    Reverse,
    Snapshot,
)


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


def backward(actions: Iterable[Action], machine: Machine, slots: Slots) -> None:
    """Carry out the rest.

    The next state to be restored is known while steps are being reversed, so a tier
    can begin to bring it back.
    """
    state = None
    rest = iter(actions)
    waiting: deque[Action] = deque()
    while action := (waiting.popleft() if waiting else next(rest, None)):
        if isinstance(action, Reverse):
            _look_ahead(rest, waiting, slots)
        state = _do(action, machine, slots, state)


def _look_ahead(rest: Iterator[Action], waiting: deque[Action], slots: Slots) -> None:
    for action in rest:
        waiting.append(action)
        if isinstance(action, Restore):
            slots.prefetch(action.slot)
        if not isinstance(action, Free):
            return


def _do(action: Action, machine: Machine, slots: Slots, state: Any) -> Any:
    match action:
        case Advance(start, stop):
            return machine.advance(state, start, stop)
        case Snapshot(step, slot, tier):
            slots.put(slot, step, machine.hold(state, step, tier))
            return state
        case Restore(_, slot):
            return machine.take(slots.get(slot))
        case Reverse(start, stop):
            machine.reverse(state, start, stop)
            return None
        case Free(slot):
            slots.free(slot)
            return state
        case _:
            assert_never(action)

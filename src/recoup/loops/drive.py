"""Drive: the plan of a loop, the slots of its states, and a backend that runs it."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from recoup.errors import ClearedError, MismatchError
from recoup.loops.state_digest import StateDigest
from recoup.loops.state_trees import Structure, flatten, unflatten
from recoup.loops.steps import Cotangents, LoopStep, require_cotangent
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
    """The plan of one loop: its schedule and its checks.

    Attributes:
        schedule: The schedule; an `Online` one if the loop ends by a condition.
        condition: Returns whether another step is to run.
        most_steps: The maximum number of steps of a loop with a condition.
        shows_beginning: Whether the initial state is among the checkpoints.
        verify: The states that are verified in backward: "first", "always", "off".
        tolerance: The difference allowed there; None for equal bits.
        stores: The tiers where states are held, for torch.
    """

    schedule: Schedule | Online
    condition: Callable[[Any], Any] | None = None
    most_steps: int | None = None
    shows_beginning: bool = False
    verify: str = "first"
    tolerance: float | None = None
    stores: tuple[Any, ...] = ()

    def actions(self, steps: int) -> Iterator[Action]:
        """Return the actions of the whole loop, given its length."""
        if isinstance(self.schedule, Online):
            return self.schedule.actions(steps)
        return self.schedule.actions()

    def goes_on(self, state: Any, steps: int) -> bool:
        """Return whether a loop with a condition goes on after some steps."""
        assert self.condition is not None, "an online schedule comes with one"
        return steps != self.most_steps and bool(self.condition(state))


class Slots:
    """The states that a schedule holds now, by slot.

    Args:
        kept: States of other slots, which drop them: the step after each, and a handle.
    """

    def __init__(self, kept: Mapping[int, tuple[int, Any]] | None = None) -> None:
        self._kept = dict(kept or {})
        self._borrowed = set(self._kept)

    def put(self, slot: int, step: int, held: Any) -> None:
        """Keep a state."""
        self._kept[slot] = step, held
        self._borrowed.discard(slot)

    def get(self, slot: int) -> Any:
        """Return the state in a slot."""
        return self._kept[slot][1]

    def prefetch(self, slot: int) -> None:
        """Start to fetch a state from its tier, if that takes time."""
        _, held = self._kept.get(slot, (0, None))
        if hasattr(held, "prefetch"):
            held.prefetch()

    def free(self, slot: int) -> None:
        """Drop a state, also from its tier."""
        _, held = self._kept.pop(slot)
        if slot not in self._borrowed and hasattr(held, "drop"):
            held.drop()

    def clear(self) -> None:
        """Drop all states."""
        for slot in list(self._kept):
            self.free(slot)

    def copy(self) -> "Slots":
        """Return slots with the same states, which these slots still own."""
        return Slots(self._kept)

    def by_step(self) -> dict[int, Any]:
        """Return the held states by the step that follows each, in order."""
        return dict(sorted(dict(self._kept.values()).items()))


class Checkpoints(Mapping[int, Any]):
    """The states that a loop holds, by position: the number of steps before each.

    Reads like the dictionary in Tangent's guide. The initial state is held as well but
    not included. Backward frees the states as it uses them, so a variable that still
    refers to the checkpoints keeps no memory alive.

    They are values: no gradient passes through them. If a loss needs more than the
    final state, make it an output of the steps (`with_outputs`).
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

        The states are not freed, so it can be called again. Costs as much as the loop's
        backward.
        """
        return self._pull_back(cotangent)

    def _shown(self) -> dict[int, Any]:
        held = self._slots.by_step()
        return {step: kept for step, kept in held.items() if step != self._hidden}


class LoopMachine(ABC):
    """Holds, runs and reverses the steps of one loop; implemented by each backend.

    Args:
        step: The step to run.
        verify: The states to compare with those of forward: "first" (those held in
            forward), "always" (every one that is ever held) or "off".
        tolerance: The difference allowed; None for equal bits.

    Attributes:
        capture_count: The number of captured arrays with gradients.
        cotangents: The gradients found so far in a backward.
        claims: Spans of steps that may have given another state than in forward, each
            with a boolean, perhaps on a device.
        digests: Digests of held states, by the step that they come before.
        expected_steps: The length of the loop, if known.
        in_place: Whether the step writes to its state.
        sweeping: Whether forward runs.
        verified_when: The values of `sweeping` at which held states are digested.
    """

    capture_count = 0

    def __init__(self, step: LoopStep, verify: str, tolerance: float | None) -> None:
        self.step = step
        self.cotangents = Cotangents([], [], [])
        self.digests: dict[Hashable, StateDigest] = {}
        self.claims: list[tuple[int, int, Any]] = []
        self.expected_steps: int | None = None
        self.in_place = False
        self.sweeping = True
        self.verify = verify
        self.tolerance = tolerance
        self.verified_when = {"always": (True, False), "first": (True,)}.get(verify, ())

    @abstractmethod
    def hold(self, state: Any, step: int, tier: int) -> Any:
        """Return a handle that keeps the state before `step`; digest it if required."""

    @abstractmethod
    def take(self, held: Any) -> Any:
        """Return a held state."""

    @abstractmethod
    def tape(self, state: Any, start: int, stop: int) -> Any:
        """Run steps with a tape."""

    @abstractmethod
    def compare(self, tape: Any) -> None:
        """Raise `MismatchError` if a tape ends in another state than forward had."""

    @abstractmethod
    def pull(self, tape: Any) -> None:
        """Pull the cotangents back through a tape."""

    @abstractmethod
    def after(self, tape: Any) -> Any:
        """Return the state after a tape of forward, and collect its outputs."""

    @abstractmethod
    def run_first(self, step: LoopStep, state: Any) -> tuple[Any, Any]:
        """Run the first step on a copy; detect whether it writes to it."""

    @abstractmethod
    def put_output(self, index: int, output: Any) -> None:
        """Collect the output of a step."""

    @abstractmethod
    def advance(self, state: Any, start: int, stop: int) -> Any:
        """Run steps without a tape."""

    def advance_by(self, step: LoopStep, state: Any, start: int, stop: int) -> Any:
        """Run steps without a tape, with a modified step."""
        collects = self.sweeping and step.with_outputs
        if self.sweeping and start == 0:
            state, output = self.run_first(step, state)
            start = 1
            if collects:
                self.put_output(0, output)
        if not collects:
            return step.advance(state, start, stop)
        for index in range(start, stop):
            state, output = step.run(state, index)
            self.put_output(index, output)
        return state

    def reverse(self, state: Any, start: int, stop: int) -> None:
        """Run steps with a tape and pull the cotangents back through them."""
        tape = self.tape(state, start, stop)
        if self.digests:
            self.compare(tape)
        self.pull(tape)

    def mismatch(self, start: int, stop: int) -> MismatchError:
        """Return the error for steps that gave another state than in forward."""
        return MismatchError(
            f"the steps {start} to {stop - 1} of the loop over {self.step.name!r} gave "
            "another state or output when recomputed in backward than in forward; a "
            "step must depend on its arguments alone: look for counters, in-place "
            "changes and random numbers that are not PyTorch's; or allow a difference "
            'with tolerance=, or switch the check off with verify="off".'
        )

    def conclude(self) -> None:
        """Raise if a recomputed state differed."""
        for start, stop, claim in self.claims:
            if bool(claim):
                raise self.mismatch(start, stop)

    def forget(self) -> None:
        """Drop the results of a backward."""
        self.cotangents = Cotangents([], [], [])
        self.claims = []


class LoopRun:
    """One loop between its forward and its backward.

    Attributes:
        slots: The states held now.
        steps: The number of steps that ran.
    """

    def __init__(
        self, machine: Any, plan: LoopPlan, structure: Structure, leaf_count: int
    ) -> None:
        self.machine = machine
        self.structure = structure
        self.leaf_count = leaf_count
        self.slots = Slots()
        self.steps = 0
        self._plan = plan
        self._is_fresh = False
        self._make_rest: Callable[[], Iterator[Action]] | None = None
        self._rest: Iterable[Action] = ()
        self._pending: tuple[Any, Reverse] | None = None
        self._last: Any = None

    def run_forward(self, state: Any, *, taped: bool) -> Any:
        """Run all steps; with `taped`, the last ones with a tape that is kept."""
        machine, schedule = self.machine, self._plan.schedule
        self._is_fresh = True
        if isinstance(schedule, Online):
            return self._run_to_condition(schedule, state)
        machine.expected_steps = self.steps = schedule.steps
        state = self._reach_first_reverse(schedule.actions, state)
        if self._pending is None:
            return state
        held, reverse = self._pending
        if not taped:
            return machine.advance(state, reverse.start, reverse.stop)
        self._last = machine.tape(machine.take(held), reverse.start, reverse.stop)
        return machine.after(self._last)

    def _run_to_condition(self, schedule: Online, state: Any) -> Any:
        placement = schedule.begin()
        while self._plan.goes_on(state, self.steps):
            state, _ = self._forward(placement.reach(self.steps), state)
            state = self.machine.advance(state, self.steps, self.steps + 1)
            self.steps += 1
        self._make_rest = partial(placement.reversal, self.steps)
        self._rest = self._make_rest()
        return state

    def _reach_first_reverse(
        self, actions: Callable[[], Iterator[Action]], state: Any
    ) -> Any:
        self._make_rest = partial(after_first_reverse, actions)
        self._rest = actions()
        state, reverse = self._forward(self._rest, state)
        self._pending = None
        if reverse is not None:
            self._pending = (self.machine.hold(state, 0, 0), reverse)
        return state

    def _forward(
        self, actions: Iterator[Action], state: Any
    ) -> tuple[Any, Reverse | None]:
        """Execute all actions up to the first reverse; return the state and that."""
        for action in actions:
            if isinstance(action, Reverse):
                return state, action
            state = _do(action, self.machine, self.slots, state)
        return state, None

    def run_backward(self, initial: Callable[[], Any]) -> Cotangents:
        """Carry out the rest of the schedule; return the gradients.

        The states are consumed. A second backward starts from the initial state.
        """
        machine = self.machine
        try:
            if not self._is_fresh:
                actions = partial(self._plan.actions, self.steps)
                self._reach_first_reverse(actions, initial())
            self._reverse(self.slots)
            machine.conclude()
            return machine.cotangents
        finally:
            self.slots.clear()
            self._pending, self._last, self._rest = None, None, ()
            self._is_fresh = False
            machine.forget()

    def pull_back(self, cotangent: Any) -> Any:
        """Return the gradient of the initial state; the states are not freed."""
        if not self._is_fresh:
            raise ClearedError(
                "expected the states of this loop, got none: they were freed by its "
                "backward; call pull before it, or run the loop without gradients."
            )
        machine = self.machine
        leaves, structure = flatten(cotangent)
        require_cotangent(structure, self.structure)
        self.begin_backward(leaves)
        digests = dict(machine.digests)
        with self.recomputing():
            try:
                self._reverse(self.slots.copy())
                machine.conclude()
                return unflatten(self.structure, machine.cotangents.state)
            finally:
                machine.forget()
                machine.digests = digests

    def recomputing(self) -> AbstractContextManager[None]:
        """Return the context in which backward recomputes steps."""
        return nullcontext()

    def begin_backward(self, cotangents: Sequence[Any]) -> None:
        """Set the cotangents of the state's leaves, and of stacked outputs."""
        machine, count = self.machine, self.leaf_count
        machine.cotangents = Cotangents(
            state=list(cotangents[:count]),
            captures=[None] * machine.capture_count,
            feed=[None] * len(machine.step.fed),
            outputs=cotangents[count:],
        )

    def _reverse(self, slots: Slots) -> None:
        machine, is_last_use = self.machine, slots is self.slots
        assert self._make_rest is not None, "set by forward"
        rest = self._rest if is_last_use else self._make_rest()
        if self._last is not None and is_last_use:
            last, self._last, self._pending = self._last, None, None
            machine.pull(last)
            del last  # else it would stay alive during the next one
        elif self._pending is not None:
            held, reverse = self._pending
            if is_last_use:
                self._pending = None
            machine.reverse(machine.take(held), reverse.start, reverse.stop)
            del held
        state = None
        # A state in a tier is fetched while steps are reversed.
        for action in _prefetching(rest, slots) if self._plan.stores else rest:
            state = _do(action, machine, slots, state)


def after_first_reverse(make: Callable[[], Iterator[Action]]) -> Iterator[Action]:
    """Return the actions after the first reverse, which forward leaves out."""
    actions = make()
    next((action for action in actions if isinstance(action, Reverse)), None)
    return actions


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


def _do(action: Action, machine: LoopMachine, slots: Slots, state: Any) -> Any:
    # No pattern matching: it costs as much as a small operator.
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

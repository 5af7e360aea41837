"""Torch run: one loop over tensors between its forward and its backward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recoup.backend.memory.storages import has_storage, storage_address
from recoup.backend.state.snapshots import buffers_restored
from recoup.engine.replay.captured_variables import Captures as Variables
from recoup.engine.replay.recomputing import recomputing
from recoup.errors import CaptureError, ClearedError, UnsupportedError, UsageError
from recoup.loops import drive
from recoup.loops.loop_outputs import OutputStack
from recoup.loops.loop_plan import Plan
from recoup.loops.slots import Slots
from recoup.loops.state_trees import flatten, unflatten
from recoup.loops.steps import KindError
from recoup.loops.torch.machine import TorchMachine, is_tensor
from recoup.loops.torch.outside import Outside, holds_other_tensors
from recoup.loops.torch.step_tape import Cotangents, Tape
from recoup.schedules.actions import Action, Reverse


class TorchRun:
    """One loop between its forward and its backward.

    Attributes:
        slots: The states held now.
        structure: The structure of a state.
    """

    def __init__(self, machine: TorchMachine, plan: Plan, state: Any) -> None:
        leaves, self.structure = flatten(state)
        self.slots = Slots()
        self._machine = machine
        self._plan = plan
        self._steps = 0
        self._running = False
        self._rest: Iterator[Action] | None = None
        self._make_rest: Callable[[], Iterator[Action]] | None = None
        self._last: Tape | None = None
        self._pending: tuple[Any, Reverse] | None = None
        self._variables: Variables | None = None
        self._places = [place for place, leaf in enumerate(leaves) if is_tensor(leaf)]
        self._constants = [None if is_tensor(leaf) else leaf for leaf in leaves]
        feed = machine.step.feed
        self._fed = (
            []
            if feed is None
            else [p for p, x in enumerate(feed.leaves) if is_tensor(x)]
        )

    def inputs(self, leaves: list[Any]) -> list[Tensor]:
        """Return every tensor the loop depends on: state, feed, captures."""
        feed = self._machine.step.feed
        fed = [] if feed is None else [feed.leaves[place] for place in self._fed]
        return [
            *(leaves[place] for place in self._places),
            *fed,
            *self._machine.captures.tensors,
        ]

    def forward(self, leaves: list[Any], *, taped: bool) -> list[Any]:
        """Run the loop from a state without a graph; return the final leaves."""
        machine = self._machine
        state = unflatten(self.structure, leaves)
        machine.outside = Outside(machine.step.function) if taped else None
        with torch.no_grad(), machine.environment.casting():
            if self._plan.schedule is None:
                state = self._run_to_condition(state)
            else:
                state = self._run_schedule(state, taped=taped)
        machine.environment.settle()
        machine.sweeping = False
        if machine.outside is not None:
            machine.outside.check(machine.step.name)
            machine.outside = None
            self._variables = Variables(machine.step.function)
        final, structure = flatten(state)
        if structure != self.structure:
            raise KindError(
                f"{machine.step.name!r} returned a state that is built otherwise than "
                "the initial one. Return the same structure, as in a scan."
            )
        if [p for p, leaf in enumerate(final) if is_tensor(leaf)] != self._places:
            raise KindError(
                f"{machine.step.name!r} turned a tensor of the state into something "
                "else, or the other way round. Begin with tensors where it returns "
                "tensors."
            )
        odd = holds_other_tensors(final, [*leaves, *machine.captures.tensors])
        if odd is not None:
            raise KindError(
                f"{machine.step.name!r} returned a state with a {type(odd).__name__} "
                "that holds tensors or makes them later: their gradients would be "
                "lost. Build the state of tuples, lists and dictionaries."
            )
        return _apart([detached(leaf) for leaf in final])

    def _run_schedule(self, state: Any, *, taped: bool) -> Any:
        machine, schedule = self._machine, self._plan.schedule
        assert schedule is not None, "asked for by the caller"
        self._steps = schedule.steps
        if machine.step.with_outputs:
            machine.stack = OutputStack(self._steps)
        self._make_rest = partial(_after_first_reverse, schedule.actions)
        self._rest = schedule.actions()
        state, reverse = drive.forward(self._rest, machine, self.slots, state)
        if reverse is None:
            return state
        self._pending = (machine.hold(state, 0, 0), reverse)
        if not taped:
            return machine.advance(state, reverse.start, reverse.stop)
        self._last = machine.tape(state, reverse.start, reverse.stop)
        for row, leaves in enumerate(self._last.outputs):
            output = unflatten(self._last.output_structure, leaves)
            if machine.stack is not None:
                machine.stack.put(reverse.start + row, output)
        return unflatten(self._last.structure, self._last.after)

    def _run_to_condition(self, state: Any) -> Any:
        machine, plan = self._machine, self._plan
        assert plan.online is not None, "no schedule, so an online one"
        assert plan.condition is not None, "an online schedule needs it"
        if machine.step.with_outputs:
            machine.stack = OutputStack(None)
        placement = plan.online.begin()
        index = 0
        while index != plan.most_steps and bool(plan.condition(state)):
            actions = placement.reach(index)
            state, _ = drive.forward(actions, machine, self.slots, state)
            state = machine.advance(state, index, index + 1)
            index += 1
        self._steps = index
        self._make_rest = partial(placement.reversal, index)
        self._rest = self._make_rest()
        return state

    def backward(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return the gradients of everything in `inputs`, in that order."""
        machine = self._machine
        if self._variables is not None:
            self._variables.check(machine.step.name)
        if self._running:
            raise CaptureError(
                f"{machine.step.name!r} uses the result of its own loop when it is run "
                "again in backward: a variable that it sees was given that name. Name "
                "the result otherwise."
            )
        self._running = True
        self._begin(gradients)
        outside = Outside(machine.step.function)
        with torch.no_grad(), recomputing(), self._again():
            try:
                self._reverse(tensors)
                machine.conclude()
                outside.check(machine.step.name)
                return self._found()
            finally:
                self.slots.clear()
                self._rest = None
                self._last = None
                self._running = False
                machine.forget()

    def pull_back(self, cotangent: Any) -> Any:
        """Return the gradient of the initial state, leaving everything in place."""
        if self._rest is None or self._make_rest is None:
            raise ClearedError(
                "the states of this loop were freed by its backward. Call pull before "
                "backward, or run the loop under torch.no_grad()."
            )
        machine = self._machine
        leaves, structure = flatten(cotangent)
        if structure != self.structure:
            raise UsageError(
                "a cotangent is built like the final state: got another structure."
            )
        machine.cotangents = Cotangents(
            list(leaves),
            [None] * len(machine.captures.sources),
            [None]
            * (0 if machine.step.feed is None else len(machine.step.feed.leaves)),
        )
        witnesses = dict(machine.witnesses)
        output_witnesses = dict(machine.output_witnesses)
        with torch.no_grad(), recomputing(), self._again():
            try:
                self._reverse_pending()
                slots, ahead = self.slots.copy(), bool(self._plan.stores)
                drive.backward(self._make_rest(), machine, slots, ahead=ahead)
                machine.conclude()
                return unflatten(self.structure, machine.cotangents.state)
            finally:
                machine.forget()
                machine.witnesses = witnesses
                machine.output_witnesses = output_witnesses

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Run the block as forward ran; leave generators and buffers as they are."""
        machine = self._machine
        with buffers_restored(machine.step.function), machine.environment.again():
            yield

    def _reverse_pending(self) -> None:
        machine = self._machine
        if self._pending is not None:
            held, reverse = self._pending
            machine.reverse(machine.take(held), reverse.start, reverse.stop)

    def again(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return the gradients with a graph of their own, by one plain loop."""
        machine = self._machine
        if machine.captures.sources is not machine.captures.tensors:
            raise UnsupportedError(
                "a second derivative is asked of a loop that captures a tensor with a "
                "hook, or a tensor and another one computed from it. Take the hook "
                "away, or pass one of the tensors as part of the state."
            )
        with torch.enable_grad(), recomputing(), self._again():
            machine.environment.rewind(None)
            results = self._plain_results(tensors)
        return _differentiated(results, gradients, tensors)

    def _plain_results(self, tensors: Sequence[Tensor]) -> list[Any]:
        step = self._machine.step
        state = self._initial(tensors)
        feed = step.feed
        if feed is not None:
            feed = feed.with_leaves(
                dict(zip(self._fed, tensors[len(self._places) :], strict=False))
            )
            step = replace(step, feed=feed)
        rows: list[list[Any]] = []
        for index in range(self._steps):
            given = None if feed is None else feed.at(index)
            state, output = step.run(state, index, given)
            rows.append(flatten(output)[0])
        leaves, _ = flatten(state)
        if not step.with_outputs:
            return leaves
        return leaves + [torch.stack(column) for column in zip(*rows, strict=True)]

    def _begin(self, gradients: Sequence[Tensor | None]) -> None:
        machine = self._machine
        feed = machine.step.feed
        state: list[Tensor | None] = [None] * len(self._constants)
        for place, gradient in zip(self._places, gradients, strict=False):
            state[place] = gradient
        machine.cotangents = Cotangents(
            state=state,
            captures=[None] * len(machine.captures.sources),
            feed=[None] * (0 if feed is None else len(feed.leaves)),
            outputs=gradients[len(self._places) :],
        )

    def _reverse(self, tensors: Sequence[Tensor]) -> None:
        machine = self._machine
        if self._rest is None:
            # A second backward: the first one has used the states up.
            state = self._initial([tensor.detach() for tensor in tensors])
            machine.environment.rewind(None)
            self._rest = self._plan.actions(self._steps)
            state, reverse = drive.forward(self._rest, machine, self.slots, state)
            if reverse is not None:
                machine.reverse(state, reverse.start, reverse.stop)
        elif self._last is not None:
            last, self._last, self._pending = self._last, None, None
            machine.pull(last)
            del last
        ahead = bool(self._plan.stores)
        drive.backward(self._rest, machine, self.slots, ahead=ahead)

    def _initial(self, tensors: Sequence[Tensor]) -> Any:
        leaves = list(self._constants)
        for place, tensor in zip(self._places, tensors, strict=False):
            leaves[place] = tensor
        return unflatten(self.structure, leaves)

    def _found(self) -> list[Tensor | None]:
        cotangents = self._machine.cotangents
        return [
            *(cotangents.state[place] for place in self._places),
            *(cotangents.feed[place] for place in self._fed),
            *cotangents.captures,
        ]


def _after_first_reverse(
    make_actions: Callable[[], Iterator[Action]],
) -> Iterator[Action]:
    actions = make_actions()
    for action in actions:
        if isinstance(action, Reverse):
            break
    return actions


def _differentiated(
    results: Sequence[Any],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
) -> list[Tensor | None]:
    tensors = [result for result in results if is_tensor(result)]
    asked = [
        (tensor, gradient)
        for tensor, gradient in zip(tensors, gradients, strict=True)
        if gradient is not None and tensor.requires_grad
    ]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    found = torch.autograd.grad(
        [tensor for tensor, _ in asked],
        wanted,
        [gradient for _, gradient in asked],
        create_graph=True,
        allow_unused=True,
    )
    by_input = dict(zip(map(id, wanted), found, strict=True))
    return [by_input.get(id(tensor)) for tensor in inputs]


def _apart(leaves: list[Any]) -> list[Any]:
    """Return the leaves with a copy of those that share memory with another.

    Autograd must see it when one of them is changed in place.
    """
    seen: set[int] = set()
    found: list[Any] = []
    for leaf in leaves:
        if is_tensor(leaf) and has_storage(leaf):
            address = storage_address(leaf)
            found.append(leaf.clone() if address in seen else leaf)
            seen.add(address)
        else:
            found.append(leaf)
    return found


def detached(leaf: Any) -> Any:
    """Return a tensor without its graph, and anything else as it is."""
    return leaf.detach() if is_tensor(leaf) else leaf

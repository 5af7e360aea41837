"""Torch run: a loop over tensors, joined to autograd by one node; its byte budget."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recoup.backend.autograd.saved_tensors import hooks_refused, records_gradients
from recoup.backend.autograd.transforms import carries_tangents
from recoup.backend.memory.storages import has_storage, storage_address
from recoup.backend.state.snapshots import buffers_restored
from recoup.engine.replay.captured_variables import Captures as Variables
from recoup.engine.replay.recomputing import recomputing
from recoup.errors import CaptureError, ClearedError, UnsupportedError
from recoup.loops import drive
from recoup.loops.drive import Checkpoints, LoopPlan, Slots
from recoup.loops.state_trees import flatten, unflatten
from recoup.loops.steps import KindError, LoopStep, require_cotangent
from recoup.loops.torch.captures import (
    CapturedTensors,
    Outside,
    captured_by,
    holds_other_tensors,
)
from recoup.loops.torch.machine import (
    Environment,
    OutputStack,
    TorchMachine,
    detached,
    is_tensor,
)
from recoup.loops.torch.step_tape import Cotangents, StepTape, record
from recoup.measurement.tracing.saved import SavedBytes
from recoup.schedules.revolve import Chunked
from recoup.schedules.schedule import Action, Reverse
from recoup.schedules.slot_budget import fit_budget


class TorchRun:
    """One loop between its forward and its backward."""

    def __init__(self, machine: TorchMachine, plan: LoopPlan, state: Any) -> None:
        leaves, self.structure = flatten(state)
        self.slots = Slots()
        self._machine = machine
        self._plan = plan
        self._steps = 0
        self._running = False
        self._rest: Iterator[Action] | None = None
        self._make_rest: Callable[[], Iterator[Action]] | None = None
        self._last: StepTape | None = None
        self._pending: tuple[Any, Reverse] | None = None
        self._variables: Variables | None = None
        self._places = [place for place, leaf in enumerate(leaves) if is_tensor(leaf)]
        self._constants = [None if is_tensor(leaf) else leaf for leaf in leaves]
        self._fed = [p for p, x in enumerate(machine.step.fed) if is_tensor(x)]

    def inputs(self, leaves: list[Any]) -> list[Tensor]:
        """Return every tensor the loop depends on: state, feed, captures."""
        fed = self._machine.step.fed
        return [
            *(leaves[place] for place in self._places),
            *(fed[place] for place in self._fed),
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
        machine.step.require_structure(structure, self.structure)
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
        self._make_rest = partial(drive.after_first_reverse, schedule.actions)
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
        machine = self._machine
        if machine.step.with_outputs:
            machine.stack = OutputStack(None)
        state, self._steps, self._make_rest = drive.run_to_condition(
            self._plan, machine, self.slots, state
        )
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
        state: list[Tensor | None] = [None] * len(self._constants)
        for place, gradient in zip(self._places, gradients, strict=False):
            state[place] = gradient
        self._begin([*state, *gradients[len(self._places) :]])
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
        require_cotangent(structure, self.structure)
        self._begin(leaves)
        witnesses = dict(machine.witnesses)
        output_witnesses = dict(machine.output_witnesses)
        with torch.no_grad(), recomputing(), self._again():
            try:
                if self._pending is not None:
                    held, reverse = self._pending
                    machine.reverse(machine.take(held), reverse.start, reverse.stop)
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
        if step.feed is not None:
            fed = dict(zip(self._fed, tensors[len(self._places) :], strict=False))
            step = replace(step, feed=step.feed.with_leaves(fed))
        rows: list[list[Any]] = []
        for index in range(self._steps):
            state, output = step.run(state, index)
            rows.append(flatten(output)[0])
        leaves, _ = flatten(state)
        if not step.with_outputs:
            return leaves
        return leaves + [torch.stack(column) for column in zip(*rows, strict=True)]

    def _begin(self, cotangents: Sequence[Tensor | None]) -> None:
        """Set the cotangents of the state's leaves, and of stacked outputs."""
        machine, count = self._machine, len(self._constants)
        machine.cotangents = Cotangents(
            state=list(cotangents[:count]),
            captures=[None] * len(machine.captures.sources),
            feed=[None] * len(machine.step.fed),
            outputs=cotangents[count:],
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


def _differentiated(
    results: Sequence[Any], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
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


def fit_torch_budget(
    step: LoopStep,
    state: Any,
    steps: int,
    budget_bytes: int,
    captures: Sequence[Tensor] = (),
) -> Chunked:
    """Return the schedule for a budget, after running the first step once on a tape.

    What autograd keeps for it is counted by unique storage, captured tensors left out;
    the state it begins with counts, because the next step's tape keeps it too.
    """
    leaves, structure = flatten(state)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    state_bytes = sum(leaf.nbytes for leaf in tensors)
    if steps == 0:
        return Chunked(0, slots=1, chunk=1)
    seen = CapturedTensors([*captures, *captured_by(step, leaves)])
    devices = [leaf.device for leaf in tensors if leaf.device.type != "cpu"]
    with (
        torch.random.fork_rng(devices=devices),
        buffers_restored(step.function),
        SavedBytes(*seen.sources) as saved,
    ):
        tape = record(step, leaves, structure, (0, 1), seen, in_place=True)
    tape_bytes = max(saved.bytes, state_bytes)
    del tape
    return fit_budget(
        steps, budget_bytes, state_bytes=state_bytes, tape_bytes=tape_bytes
    )


class _LoopNode(torch.autograd.Function):
    """The one node of a loop in the outer graph; it computes nothing in forward."""

    @staticmethod
    def forward(
        ctx: Any, run: TorchRun, results: list[Tensor], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        # For autograd's own checks: freed twice, changed in place, hooks around.
        ctx.save_for_backward(*inputs)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        if all(gradient is None for gradient in gradients):
            return (None, None, *[None] * len(tensors))
        if torch.is_grad_enabled():
            return (None, None, *ctx.run.again(tensors, gradients))
        return (None, None, *ctx.run.backward(tensors, gradients))


def run_torch(
    step: LoopStep, initial_state: Any, plan: LoopPlan, captures: Sequence[Tensor] = ()
) -> tuple[Any, Any, Checkpoints]:
    """Run a loop on tensors.

    Returns:
        The final state, the stacked outputs (None without), and the checkpoints.
    """
    refused = hooks_refused()
    if refused is not None:
        raise UnsupportedError(
            "checkpointed_loop is called under a torch.func transform, which it cannot "
            f"carry ({refused}). Use torch.autograd.grad, backward or loops.grad."
        )
    leaves, _ = flatten(initial_state)
    found = captured_by(step, leaves)
    if carries_tangents([*filter(is_tensor, leaves), *captures, *found]):
        raise UnsupportedError(
            "checkpointed_loop is called in forward-mode differentiation, which it "
            "cannot carry: tangents would be lost. Use torch.autograd.grad, backward "
            "or recoup.loops.grad, or run the loop plainly there."
        )
    machine = TorchMachine(
        step,
        CapturedTensors([*captures, *found]),
        Environment(leaves, step.function),
        verify=plan.verify,
        tolerance=plan.tolerance,
        stores=plan.stores,
    )
    run = TorchRun(machine, plan, initial_state)
    inputs = run.inputs(leaves)
    wanted = records_gradients() and any(tensor.requires_grad for tensor in inputs)
    final = run.forward([detached(leaf) for leaf in leaves], taped=wanted)
    stack = machine.stack
    stacked = [] if stack is None else stack.leaves()
    if wanted:
        places = [place for place, leaf in enumerate(final) if is_tensor(leaf)]
        results = _LoopNode.apply(run, [final[p] for p in places] + stacked, *inputs)
        for place, result in zip(places, results, strict=False):
            final[place] = result
        stacked = list(results[len(places) :])
    outputs = None if stack is None else stack.tree(stacked)
    checkpoints = Checkpoints(
        run.slots,
        lambda held: unflatten(held.structure, machine.leaves_of(held)),
        run.pull_back,
        hidden=None if plan.shows_beginning else 0,
    )
    return unflatten(run.structure, final), outputs, checkpoints

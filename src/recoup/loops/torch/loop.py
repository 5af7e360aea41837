"""Torch loop: a loop over tensors, joined to autograd by one node; its byte budget."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from recoup.backend.autograd.saved_tensors import hooks_refused, records_gradients
from recoup.backend.autograd.transforms import carries_tangents
from recoup.backend.memory.ledger import tensor_bytes
from recoup.backend.memory.storages import has_storage, storage_address
from recoup.backend.state.snapshots import buffers_restored
from recoup.engine.replay.call_state import Captures as Variables
from recoup.engine.replay.recomputing import count_replay_seconds, recomputing
from recoup.errors import CaptureError, UnsupportedError, UsageError
from recoup.loops.drive import Checkpoints, LoopPlan, LoopRun
from recoup.loops.state_trees import flatten, unflatten
from recoup.loops.steps import KindError, LoopStep
from recoup.loops.torch.captures import (
    CapturedTensors,
    Outside,
    captured_by,
    holds_other_tensors,
)
from recoup.loops.torch.machine import (
    Environment,
    TorchMachine,
    detached,
    is_tensor,
)
from recoup.loops.torch.step_tape import record
from recoup.measurement.tracing.saved import SavedBytes
from recoup.schedules.revolve import Chunked
from recoup.schedules.slot_budget import fit_budget


class TorchRun(LoopRun):
    """One loop over tensors between its forward and its backward."""

    machine: TorchMachine

    def __init__(self, machine: TorchMachine, plan: LoopPlan, state: Any) -> None:
        leaves, structure = flatten(state)
        super().__init__(machine, plan, structure, len(leaves))
        self._running = False
        self._variables: Variables | None = None
        self._places = [place for place, leaf in enumerate(leaves) if is_tensor(leaf)]
        self._constants = [None if is_tensor(leaf) else leaf for leaf in leaves]
        self._fed = [p for p, x in enumerate(machine.step.fed) if is_tensor(x)]

    def inputs(self, leaves: list[Any]) -> list[Tensor]:
        """Return all tensors that the loop depends on: state, feed, captures."""
        fed = self.machine.step.fed
        return [
            *(leaves[place] for place in self._places),
            *(fed[place] for place in self._fed),
            *self.machine.captures.tensors,
        ]

    def forward(self, leaves: list[Any], *, taped: bool) -> list[Any]:
        """Run the loop from a state without a graph; return the final leaves."""
        machine = self.machine
        state = unflatten(self.structure, leaves)
        machine.outside = Outside(machine.step.function) if taped else None
        with torch.no_grad(), machine.environment.casting():
            state = self.run_forward(state, taped=taped)
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
                "else, or the other way round; begin with tensors where it returns "
                "tensors."
            )
        odd = holds_other_tensors(final, [*leaves, *machine.captures.tensors])
        if odd is not None:
            raise KindError(
                f"{machine.step.name!r} returned a state with a {type(odd).__name__} "
                "that holds tensors or makes them later: their gradients would be "
                "lost; build the state of tuples, lists and dictionaries."
            )
        return _apart([detached(leaf) for leaf in final])

    def backward(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return the gradients of everything in `inputs`, in that order."""
        machine = self.machine
        if self._variables is not None:
            self._variables.check(machine.step.name)
        if self._running:
            raise CaptureError(
                f"{machine.step.name!r} uses the result of its own loop when it is "
                "recomputed in backward: a variable that it reads was assigned the "
                "result; use another name for the result."
            )
        self._running = True
        state: list[Tensor | None] = [None] * len(self._constants)
        for place, gradient in zip(self._places, gradients, strict=False):
            state[place] = gradient
        self.begin_backward([*state, *gradients[len(self._places) :]])
        outside = Outside(machine.step.function)

        def initial() -> Any:
            machine.environment.rewind(None)
            return self._initial([tensor.detach() for tensor in tensors])

        with self.recomputing():
            try:
                found = self.run_backward(initial)
                outside.check(machine.step.name)
            finally:
                self._running = False
        return [
            *(found.state[place] for place in self._places),
            *(found.feed[place] for place in self._fed),
            *found.captures,
        ]

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Run steps as in forward; restore generators and buffers afterwards."""
        machine, start = self.machine, perf_counter()
        with (
            torch.no_grad(),
            recomputing(),
            buffers_restored(machine.step.function),
            machine.environment.again(),
        ):
            yield
        count_replay_seconds(start)

    def again(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return differentiable gradients, computed by one plain loop."""
        machine = self.machine
        if machine.captures.sources is not machine.captures.tensors:
            raise UnsupportedError(
                "expected no second derivative of a loop that captures a tensor with a "
                "hook, or a tensor and another one computed from it; remove the hook, "
                "or pass one of the tensors as part of the state."
            )
        with self.recomputing(), torch.enable_grad():
            machine.environment.rewind(None)
            results = self._plain_results(tensors)
        return _differentiated(results, gradients, tensors)

    def _plain_results(self, tensors: Sequence[Tensor]) -> list[Any]:
        fed = dict(zip(self._fed, tensors[len(self._places) :], strict=False))
        leaves, _ = flatten(self._initial(tensors))
        final, columns = self.machine.step.run_plain(
            leaves, self.structure, fed, self.steps
        )
        return [*final, *map(torch.stack, columns)]

    def _initial(self, tensors: Sequence[Tensor]) -> Any:
        leaves = list(self._constants)
        for place, tensor in zip(self._places, tensors, strict=False):
            leaves[place] = tensor
        return unflatten(self.structure, leaves)


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
    """Return the leaves with copies of those that share memory with another.

    Otherwise autograd would not see that one of them is changed in place.
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


def fit_schedule(
    step: LoopStep,
    state: Any,
    steps: int,
    budget_bytes: int,
    captures: Sequence[Tensor],
    vjp: Any,
) -> Chunked:
    """Return the schedule for a budget, after running the first step once on a tape.

    Memory that autograd keeps for it is counted by unique storage, without captured
    tensors; its initial state counts, because the next step's tape keeps it too.
    """
    del vjp  # refused by `run_loop`
    leaves, structure = flatten(state)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    state_bytes = sum(map(tensor_bytes, tensors))
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
        # For autograd's own checks: freed twice, changed in place, enclosing hooks.
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


def run_loop(
    step: LoopStep,
    initial_state: Any,
    plan: LoopPlan,
    captures: Sequence[Tensor],
    vjp: Any,
) -> tuple[Any, Any, Checkpoints]:
    """Run a loop on tensors.

    Returns:
        The final state, the stacked outputs (None without), and the checkpoints.
    """
    if vjp is not None:
        raise UsageError(
            "expected vjp= with plain NumPy functions only, got torch tensors, which "
            "torch differentiates by itself; leave it out."
        )
    refused = hooks_refused()
    if refused is not None:
        raise UnsupportedError(
            "expected checkpointed_loop outside torch.func transforms, got a "
            f"torch.func transform ({refused}); use torch.autograd.grad, backward or "
            "loops.grad."
        )
    leaves, _ = flatten(initial_state)
    found = captured_by(step, leaves)
    if carries_tangents([*filter(is_tensor, leaves), *captures, *found]):
        raise UnsupportedError(
            "expected checkpointed_loop outside forward-mode differentiation, where "
            "tangents would be lost; use torch.autograd.grad, backward or "
            "recoup.loops.grad, or run the loop plainly there."
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

"""Torch loop: a schedule carried out on tensors, joined to autograd by one node."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recoup.backend.autograd.saved_tensors import hooks_refused, records_gradients
from recoup.backend.autograd.transforms import carries_tangents
from recoup.errors import UnsupportedError
from recoup.loops.loop_plan import Plan
from recoup.loops.slots import Checkpoints
from recoup.loops.state_trees import flatten, unflatten
from recoup.loops.steps import Step
from recoup.loops.torch.captures import Captures, captured_by
from recoup.loops.torch.machine import TorchMachine, is_tensor
from recoup.loops.torch.run import TorchRun, detached
from recoup.loops.torch.step_environment import Environment


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
    step: Step, initial_state: Any, plan: Plan, captures: Sequence[Tensor] = ()
) -> tuple[Any, Any, Checkpoints]:
    """Run a loop on tensors.

    Args:
        step: What to run.
        initial_state: Where to begin.
        plan: How to carry it out.
        captures: Captured tensors that are not to be found by looking.

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
        Captures([*captures, *found]),
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
        partial(_state_of, machine),
        run.pull_back,
        hidden=None if plan.shows_beginning else 0,
    )
    return unflatten(run.structure, final), outputs, checkpoints


def _state_of(machine: TorchMachine, held: Any) -> Any:
    return unflatten(held.structure, machine.leaves_of(held))

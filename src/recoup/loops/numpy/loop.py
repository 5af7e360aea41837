"""NumPy loop: a schedule carried out on arrays, one primitive where autograd traces."""

import importlib.util
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from recoup.errors import CaptureError, UnsupportedError, UsageError
from recoup.loops.drive import Checkpoints, LoopPlan, LoopRun
from recoup.loops.numpy.machine import (
    NumpyMachine,
    hides_arrays,
    is_continuous,
    traced_arrays,
)
from recoup.loops.state_trees import flatten, unflatten
from recoup.loops.steps import LoopStep
from recoup.schedules.revolve import Chunked
from recoup.schedules.slot_budget import fit_budget


def run_loop(
    step: LoopStep,
    initial_state: Any,
    plan: LoopPlan,
    captures: Sequence[Any],
    vjp: Callable[..., Any] | None,
) -> tuple[Any, Any, Checkpoints]:
    """Run a loop on arrays.

    Returns:
        The final state, the stacked outputs (None without), and the checkpoints.
    """
    leaves, structure = flatten(_opened(initial_state))
    boxes = boxes_of(step, captures)
    machine = NumpyMachine(
        step, boxes, vjp, verify=plan.verify, tolerance=plan.tolerance
    )
    run = NumpyRun(machine, plan, structure, len(leaves))
    inputs = [*leaves, *step.fed, *boxes]
    if any(map(_is_box, inputs)):
        from recoup.loops.numpy.step_tape import loop_node  # an optional package

        traced = loop_node(run, *inputs)
        results = list(run.constants)
        for place, target in enumerate(run.continuous):
            results[target] = traced[place]
    else:
        results = run.forward(inputs)
    final, stacked = results[: len(leaves)], results[len(leaves) :]
    outputs = None
    if step.with_outputs and stacked:
        outputs = unflatten(machine.output_structure, stacked)
    checkpoints = Checkpoints(
        run.slots,
        machine.take,
        run.pull_back,
        hidden=None if plan.shows_beginning else 0,
    )
    return unflatten(structure, final), outputs, checkpoints


class NumpyRun(LoopRun):
    """One loop over arrays between its forward and its backward.

    Attributes:
        continuous: The results that can be differentiated.
        constants: The other results, in their places.
    """

    machine: NumpyMachine

    def __init__(
        self, machine: NumpyMachine, plan: LoopPlan, structure: Any, leaf_count: int
    ) -> None:
        super().__init__(machine, plan, structure, leaf_count)
        self.continuous: list[int] = []
        self.constants: list[Any] = []

    def forward(self, values: Sequence[Any], *, traced: bool = False) -> list[Any]:
        """Run the loop on values without traces; return final leaves and outputs.

        If a derivative is to follow, the last steps are traced right away.
        """
        machine = self.machine
        self._set(values)
        state = unflatten(self.structure, list(values[: self.leaf_count]))
        state = self.run_forward(state, taped=traced and machine.vjp is None)
        machine.sweeping = False
        leaves, structure = flatten(state)
        machine.step.require_structure(structure, self.structure)
        if any(map(_is_box, leaves)):
            raise CaptureError(
                f"{machine.step.name!r} uses a traced array that was not found in its "
                "closure, defaults or objects: its gradient would be lost; make it a "
                "variable of the function around the step, or part of the state."
            )
        if traced:
            machine.refuse_remains()
            _refuse_hidden([*values[: self.leaf_count], *leaves], machine.step.name)
        results = [*leaves, *(machine.outputs() if machine.rows else [])]
        self.continuous = [p for p, r in enumerate(results) if is_continuous(r)]
        self.constants = [None if is_continuous(r) else r for r in results]
        return results

    def backward(self, values: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Return the gradients of state, feed and captures, in this order."""
        self._set(values)
        self.begin_backward(cotangents)
        found = self.run_backward(
            lambda: unflatten(self.structure, list(values[: self.leaf_count]))
        )
        self.machine.refuse_remains()
        return [*found.state, *found.feed, *found.captures]

    def pull_back(self, cotangent: Any) -> Any:
        """Return the gradient of the initial state; the states are not freed."""
        if self.machine.vjp is None and not _has_autograd():
            raise UnsupportedError(
                "expected HIPS autograd or vjp= for the derivative of a NumPy "
                "function, got none; install it with: pip install 'recoup[numpy]'."
            )
        return super().pull_back(cotangent)

    def _set(self, values: Sequence[Any]) -> None:
        machine = self.machine
        count = len(machine.captured)
        machine.values = list(values[len(values) - count :])
        fed = dict(enumerate(values[self.leaf_count :]))
        machine.step = machine.step.with_fed(fed)


def boxes_of(step: LoopStep, captures: Sequence[Any]) -> list[Any]:
    """Return the traced arrays that a step captures, each once."""
    found = [*captures, *traced_arrays(step.function)]
    return list({id(box): box for box in found if _is_box(box)}.values())


def _is_box(value: Any) -> bool:
    tracer = sys.modules.get("autograd.tracer")
    return tracer is not None and tracer.isbox(value)


def _refuse_hidden(leaves: Sequence[Any], name: str) -> None:
    for leaf in leaves:
        if not is_continuous(leaf) and hides_arrays(leaf):
            raise UsageError(
                f"the state of the loop over {name!r} has a {type(leaf).__name__} that "
                "holds arrays: their gradients would be lost; build it of tuples, "
                "lists, dictionaries and arrays of numbers."
            )


def _opened(tree: Any) -> Any:
    """Return a tree whose traced tuples, lists and dictionaries are plain ones."""
    builtins = sys.modules.get("autograd.builtins")
    if builtins is None:
        return tree
    leaves, structure = flatten(tree)
    return unflatten(structure, [_opened_box(leaf, builtins) for leaf in leaves])


def _opened_box(leaf: Any, builtins: Any) -> Any:
    if isinstance(leaf, builtins.SequenceBox):
        parts = [_opened(leaf[place]) for place in range(len(leaf))]
        return parts if isinstance(_untraced(leaf), list) else tuple(parts)
    if isinstance(leaf, builtins.DictBox):
        return {name: _opened(leaf[name]) for name in leaf}
    return leaf


def _has_autograd() -> bool:
    return importlib.util.find_spec("autograd") is not None


def fit_schedule(
    step: LoopStep,
    state: Any,
    steps: int,
    budget_bytes: int,
    captures: Sequence[Any],
    vjp: Callable[..., Any] | None,
) -> Chunked:
    """Return the schedule for a budget, after tracing the first step once.

    With a user's vjp, or without HIPS autograd, a tape consists of the states before
    its steps. Otherwise it is the memory that the first step leaves allocated when HIPS
    autograd traces it, counted by the interpreter: arrays and the objects that link
    them.
    """
    leaves, structure = flatten(state)
    plain = [_untraced(leaf) for leaf in leaves]
    state_bytes = sum(np.asarray(leaf).nbytes for leaf in plain)
    tape_bytes = state_bytes
    if steps and vjp is None and _has_autograd():
        tape_bytes = _traced_bytes(step, unflatten(structure, plain), captures)
    return fit_budget(
        steps,
        budget_bytes,
        state_bytes=state_bytes,
        tape_bytes=max(tape_bytes, state_bytes),
    )


def _traced_bytes(step: LoopStep, state: Any, captures: Sequence[Any]) -> int:
    from recoup.loops.numpy.step_tape import record_steps  # an optional package

    boxes = boxes_of(step, captures)
    step = step.with_fed(dict(enumerate(map(_untraced, step.fed))))
    machine = NumpyMachine(step, boxes, None, verify="off", tolerance=None)
    machine.values = [_untraced(box) for box in boxes]
    machine.in_place = True  # unknown before a step has run
    kept = machine.hold(state, 0, 0)
    # The first run fills caches.
    record_steps(machine, machine.take(kept), 0, 1)
    given = machine.take(kept)
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        record = record_steps(machine, given, 0, 1)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        if not was_tracing:
            tracemalloc.stop()
    del record
    return after - before


def _untraced(leaf: Any) -> Any:
    """Return a value without its traces, which may be nested."""
    tracer = sys.modules.get("autograd.tracer")
    return leaf if tracer is None else tracer.getval(leaf)

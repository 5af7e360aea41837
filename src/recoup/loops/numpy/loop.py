"""NumPy loop: a schedule carried out on arrays, one primitive where autograd traces."""

import importlib.util
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from recoup.errors import CaptureError, ClearedError, UnsupportedError, UsageError
from recoup.loops import drive
from recoup.loops.drive import Checkpoints, LoopPlan, Slots
from recoup.loops.numpy.machine import (
    NumpyMachine,
    hides_arrays,
    is_continuous,
    traced_arrays,
)
from recoup.loops.state_trees import flatten, unflatten
from recoup.loops.steps import LoopStep, require_cotangent
from recoup.schedules.revolve import Chunked
from recoup.schedules.schedule import Action, Reverse
from recoup.schedules.slot_budget import fit_budget


def run_numpy(
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


class NumpyRun:
    """One loop over arrays between its forward and its backward.

    Attributes:
        slots: The states held now.
        steps: How many steps were run.
        continuous: Which results can be differentiated.
        constants: The other results, in their places.
        structure: The structure of a state.
        leaf_count: How many leaves it has.
    """

    def __init__(
        self, machine: NumpyMachine, plan: LoopPlan, structure: Any, leaf_count: int
    ) -> None:
        self.machine = machine
        self.slots = Slots()
        self.steps = 0
        self.continuous: list[int] = []
        self.constants: list[Any] = []
        self._plan = plan
        self.structure = structure
        self.leaf_count = leaf_count
        self._make_rest: Callable[[], Iterator[Action]] | None = None
        self._pending: tuple[Any, Reverse] | None = None
        self._fresh = False
        self._traced = False
        self._last: Any = None

    def forward(self, values: Sequence[Any], *, traced: bool = False) -> list[Any]:
        """Run the loop on values without traces; return final leaves and outputs.

        Where a derivative is to follow, the last steps are traced at once.
        """
        self._traced = traced and not self.machine.has_vjp
        machine = self.machine
        self._set(values)
        state = unflatten(self.structure, list(values[: self.leaf_count]))
        if self._plan.schedule is None:
            state, self.steps, self._make_rest = drive.run_to_condition(
                self._plan, machine, self.slots, state
            )
        else:
            state = self._run_schedule(self._plan.schedule.actions, state)
            self.steps = self._plan.schedule.steps
        machine.sweeping = False
        self._fresh = True
        leaves, structure = flatten(state)
        machine.step.require_structure(structure, self.structure)
        if any(map(_is_box, leaves)):
            raise CaptureError(
                f"{machine.step.name!r} uses a traced array that was not found in its "
                "closure, defaults or objects: its gradient would be lost. Make it a "
                "variable of the function around the step, or a part of the state."
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
        machine = self.machine
        self._set(values)
        if not self._fresh:
            # A second backward: the first one has used the states up.
            state = unflatten(self.structure, list(values[: self.leaf_count]))
            actions = partial(self._plan.actions, self.steps)
            self._make_rest = partial(drive.after_first_reverse, actions)
            state, reverse = drive.forward(actions(), machine, self.slots, state)
            self._pending = (machine.hold(state, 0, 0), reverse) if reverse else None
        self._begin(cotangents)
        try:
            self._reverse(self.slots)
            machine.refuse_remains()
            return [
                *machine.state_cotangents,
                *machine.feed_cotangents,
                *machine.captured_cotangents,
            ]
        finally:
            self.slots.clear()
            self._pending = None
            self._last = None
            self._fresh = False

    def pull_back(self, cotangent: Any) -> Any:
        """Return the gradient of the initial state, leaving everything in place."""
        if not self._fresh:
            raise ClearedError(
                "the states of this loop were freed by its backward. Call pull before "
                "it, or outside of autograd."
            )
        leaves, structure = flatten(cotangent)
        require_cotangent(structure, self.structure)
        _require_derivatives(self.machine)
        witnesses = dict(self.machine.witnesses)
        self._begin(leaves)
        try:
            self._reverse(self.slots.copy())
            return unflatten(self.structure, self.machine.state_cotangents)
        finally:
            self.machine.witnesses = witnesses

    def _set(self, values: Sequence[Any]) -> None:
        machine = self.machine
        count = len(machine.captured)
        machine.values = list(values[len(values) - count :])
        feed = machine.step.feed
        if feed is not None:
            places = range(len(feed.leaves))
            fed = dict(zip(places, values[self.leaf_count :], strict=False))
            machine.step = replace(machine.step, feed=feed.with_leaves(fed))

    def _run_schedule(self, actions: Callable[[], Iterator[Action]], state: Any) -> Any:
        machine = self.machine
        self._make_rest = partial(drive.after_first_reverse, actions)
        state, reverse = drive.forward(actions(), machine, self.slots, state)
        if reverse is None:
            return state
        self._pending = (machine.hold(state, 0, 0), reverse)
        if not self._traced:
            return machine.advance(state, reverse.start, reverse.stop)
        from recoup.loops.numpy.step_tape import record_steps  # an optional package

        held = machine.take(self._pending[0])
        self._last = record_steps(machine, held, reverse.start, reverse.stop)
        plain = [[_plain(leaf) for leaf in row] for row in self._last.rows]
        machine.rows += plain
        return unflatten(self._last.structure, self._last.values())

    def _begin(self, cotangents: Sequence[Any]) -> None:
        machine = self.machine
        machine.state_cotangents = list(cotangents[: self.leaf_count])
        machine.output_cotangents = cotangents[self.leaf_count :]
        machine.captured_cotangents = [None] * len(machine.captured)
        machine.feed_cotangents = [None] * len(machine.step.fed)

    def _reverse(self, slots: Slots) -> None:
        assert self._make_rest is not None, "set by forward"
        if self._last is not None and slots is self.slots:
            from recoup.loops.numpy.step_tape import pull_record  # an optional package

            last, self._last = self._last, None
            pull_record(self.machine, last)
            del last  # or it would stay beside the next one
        elif self._pending is not None:
            held, reverse = self._pending
            state = self.machine.take(held)
            self.machine.reverse(state, reverse.start, reverse.stop)
        drive.backward(self._make_rest(), self.machine, slots)


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
                "holds arrays: their gradients would be lost. Build it of tuples, "
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
        return parts if isinstance(_plain(leaf), list) else tuple(parts)
    if isinstance(leaf, builtins.DictBox):
        return {name: _opened(leaf[name]) for name in leaf}
    return leaf


def _require_derivatives(machine: NumpyMachine) -> None:
    if machine.has_vjp:
        return
    try:
        import autograd  # noqa: F401 (only to know)
    except ImportError as error:
        raise UnsupportedError(
            "the derivative of a NumPy function needs HIPS autograd or vjp=. Install "
            "it with: pip install 'recoup[numpy]'."
        ) from error


def _plain(leaf: Any) -> Any:
    return leaf._value if _is_box(leaf) else leaf  # noqa: SLF001


def fit_numpy_budget(
    step: LoopStep,
    state: Any,
    steps: int,
    budget_bytes: int,
    captures: Sequence[Any],
    vjp: Callable[..., Any] | None,
) -> Chunked:
    """Return the schedule for a budget, after tracing the first step once.

    With a vjp of the user's, or nothing that could differentiate, a tape is the states
    before its steps. Otherwise it is what the first step leaves behind when HIPS
    autograd traces it, counted by the interpreter: arrays and the objects that link
    them.
    """
    leaves, structure = flatten(state)
    plain = [_untraced(leaf) for leaf in leaves]
    state_bytes = sum(np.asarray(leaf).nbytes for leaf in plain)
    tape_bytes = state_bytes
    has_autograd = importlib.util.find_spec("autograd") is not None
    if steps and vjp is None and has_autograd:
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
    if step.feed is not None:
        fed = {place: _untraced(leaf) for place, leaf in enumerate(step.feed.leaves)}
        step = replace(step, feed=step.feed.with_leaves(fed))
    machine = NumpyMachine(step, boxes, None, verify="off", tolerance=None)
    machine.values = [_untraced(box) for box in boxes]
    machine.in_place = True  # for all that is known before a step has run
    kept = machine.hold(state, 0, 0)
    # The first run makes what is made once, such as caches.
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
    """Return a value without the traces it is in, one around the other."""
    tracer = sys.modules.get("autograd.tracer")
    return leaf if tracer is None else tracer.getval(leaf)

"""A byte budget for a NumPy loop: measure one traced step, choose slots and tape."""

import importlib.util
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from recoup.loops.numpy.loop import boxes_of
from recoup.loops.numpy.machine import NumpyMachine
from recoup.loops.state_trees import flatten, unflatten
from recoup.loops.steps import Step
from recoup.schedules.revolve import Chunked
from recoup.schedules.slot_budget import fit_budget


def fit_numpy_budget(
    step: Step,
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
    plain = [_plain(leaf) for leaf in leaves]
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


def _traced_bytes(step: Step, state: Any, captures: Sequence[Any]) -> int:
    from recoup.loops.numpy.step_tape import record_steps  # an optional package

    boxes = boxes_of(step, captures)
    if step.feed is not None:
        fed = {place: _plain(leaf) for place, leaf in enumerate(step.feed.leaves)}
        step = replace(step, feed=step.feed.with_leaves(fed))
    machine = NumpyMachine(step, boxes, None, verify="off", tolerance=None)
    machine.values = [_plain(box) for box in boxes]
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


def _plain(leaf: Any) -> Any:
    """Return a value without the traces it is in, one around the other."""
    tracer = sys.modules.get("autograd.tracer")
    return leaf if tracer is None else tracer.getval(leaf)

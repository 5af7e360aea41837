"""JAX loop: a schedule as a constant table, run inside one jitted program.

The actions become a table of integers that a `lax.scan` iterates over. The table is a
constant, so under `vmap` no branch depends on a batched value, and the program does not
grow with the number of steps. The step is traced, so it can depend only on its
arguments and captures, and backward needs no verification.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from recoup.engine.replay.call_state import Captures as Variables
from recoup.errors import CaptureError, MismatchError, UnsupportedError, UsageError
from recoup.loops.drive import Checkpoints, LoopPlan, Slots
from recoup.loops.jax.run import (
    REVERSE_START,
    LoopProgram,
    Tree,
    inexact,
    merged,
    run,
    table,
)
from recoup.loops.steps import ConcreteError, LoopStep, Stacked
from recoup.schedules.online import Online
from recoup.schedules.revolve import Revolve
from recoup.schedules.schedule import Schedule
from recoup.schedules.slot_budget import require_tape


def run_loop(
    step: LoopStep,
    initial_state: Tree,
    plan: LoopPlan,
    captures: Sequence[Any],
    vjp: Any,
) -> tuple[Tree, Tree, Checkpoints]:
    """Run a loop on JAX arrays; works inside `jit`, `vmap` and `grad`.

    Costs `counts().evaluations` steps, one more for each step that shares a tape with
    others, and those of the last tape once more: a tape holds states, not residuals.

    Returns:
        The final state, the stacked outputs (None without), and the checkpoints.
    """
    if captures or vjp is not None:
        raise UsageError(
            "expected no captures= and vjp= with JAX, which finds captured arrays and "
            "derivatives by itself; leave them out."
        )
    state = jax.tree.map(jnp.asarray, initial_state)
    schedule = _schedule(step, state, plan)
    if schedule.steps == 0:
        return state, None, Checkpoints(Slots(), _same, _same)
    feed = stacked_feed(step)
    loop, constants = _closed(step, feed, state, schedule)
    final, outputs, kept = run(loop, state, constants, feed)
    slots = Slots()
    for slot, position in loop.positions.items():
        slots.put(slot, position, jax.tree.map(lambda rows, s=slot: rows[s], kept))

    def pull_back(cotangent: Tree) -> Tree:
        _, pull = jax.vjp(lambda begin: run(loop, begin, constants, feed)[0], state)
        return pull(cotangent)[0]

    checkpoints = Checkpoints(
        slots, _sealed, pull_back, hidden=None if plan.shows_beginning else 0
    )
    return final, (outputs if step.with_outputs else None), checkpoints


def _closed(
    step: LoopStep, feed: Tree, state: Tree, schedule: Schedule
) -> tuple[LoopProgram, list[Any]]:
    """Return the constant part of the loop, and the arrays its step captures."""

    def call(state: Tree, index: Any, given: Tree) -> tuple[Tree, Tree]:
        return step.run_on(state, index, given)

    first = jax.tree.map(lambda rows: rows[0], feed)
    index = jnp.zeros((), jnp.int32)
    seen = Variables(step.function)
    try:
        _require_same_types(call, state, index, first, step)
        closed, constants = jax.closure_convert(call, state, index, first)
    except jax.errors.JAXTypeError as error:
        raise ConcreteError(
            f"{step.name!r} uses an array or its index as a Python number, in a branch "
            "or to index a list, but JAX traces a step once for all; use jnp.where, "
            "lax.cond or jax.lax.switch, or pass the values as inputs=."
        ) from error
    try:
        seen.check(step.name)
    except CaptureError as error:
        raise MismatchError(
            f"{step.name!r} changes a variable that it captures, but JAX traces a step "
            "once and runs that for all, so the change would happen once; make it part "
            "of the state, or use the index with with_index=True."
        ) from error
    rows, first_reverse, positions = table(schedule.actions())
    counts = schedule.counts()
    loop = LoopProgram(
        # `fori_loop` counts in 64 bits where JAX has them; the step was traced with 32.
        call=lambda state, index, given, constants: closed(
            state, lax.convert_element_type(index, jnp.int32), given, *constants
        ),
        steps=schedule.steps,
        slots=max(counts.peak_slots, 1),
        chunk=counts.peak_tape,
        forward=rows[:first_reverse],
        backward=rows[first_reverse:],
        last=int(rows[first_reverse][REVERSE_START]),
        positions=positions,
    )
    return loop, list(constants)


def _schedule(step: LoopStep, state: Tree, plan: LoopPlan) -> Schedule:
    """Return the schedule; a loop with a condition runs once to find its length."""
    if not isinstance(plan.schedule, Online):
        return plan.schedule
    call = jax.jit(lambda state, index, given: step.run_on(state, index, given)[0])
    index = 0
    state = lax.stop_gradient(state)
    try:
        while plan.goes_on(state, index):
            given = None if step.feed is None else step.feed.at(index)
            state = call(state, index, given)
            index += 1
    except jax.errors.ConcretizationTypeError as error:
        raise UnsupportedError(
            "expected a JAX loop of known length inside jit, got one whose length "
            "depends on its values, but its table must be constant; call it outside "
            "jit, or give seq_length."
        ) from error
    return Revolve(index, slots=plan.schedule.slots)


def stacked_feed(step: LoopStep) -> Tree:
    """Return the inputs of all steps as arrays whose first axis is the step."""
    if step.feed is None:
        return None
    if isinstance(step.feed, Stacked):
        return jax.tree.map(jnp.asarray, step.feed.whole())
    trees = [step.feed.at(index) for index in range(step.feed.length)]
    return jax.tree.map(lambda *rows: jnp.stack(rows), *trees)


def _require_same_types(
    call: Any, state: Tree, index: Any, first: Tree, step: LoopStep
) -> None:
    after, _ = jax.eval_shape(call, state, index, first)
    before = jax.eval_shape(lambda: state)
    step.require_structure(jax.tree.structure(after), jax.tree.structure(before))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise UsageError(
                f"{step.name!r} turned an array of shape {old.shape} and type "
                f"{old.dtype} into one of shape {new.shape} and type {new.dtype}; "
                "begin with the shape and type that it returns."
            )


def _same(held: Any) -> Any:
    return held


@jax.custom_vjp
def _sealed(state: Tree) -> Tree:
    """Return a checkpoint; no derivative passes through it."""
    return state


def _seal(state: Tree) -> tuple[Tree, None]:
    return state, None


def _break_seal(*_: Any) -> Tree:
    raise UnsupportedError(
        "expected no derivative of a checkpoint of a loop, which is only a value; "
        "return it as an output of the step with with_outputs=True, or use "
        "jax.lax.stop_gradient(checkpoints[position])."
    )


_sealed.defvjp(_seal, _break_seal)


def fit_schedule(
    step: LoopStep,
    state: Any,
    steps: int,
    budget_bytes: int,
    captures: Sequence[Any],
    vjp: Any,
) -> Revolve:
    """Return the schedule for a budget.

    A tape in JAX holds states, and one step's residuals at a time. States are best used
    as slots then: Revolve with all of them takes the fewest evaluations. The residuals
    of a step are those of its traced derivative, captured arrays included: an upper
    bound.

    Raises:
        UsageError: The residuals of a single step do not fit.
    """
    del captures, vjp  # refused by `run_loop`
    state = jax.tree.map(jnp.asarray, state)
    state_bytes = _bytes_of(state)
    tape_bytes = _residual_bytes(step, state) if steps else 0
    require_tape(budget_bytes, tape_bytes)
    slots = 1 + (budget_bytes - tape_bytes) // max(state_bytes, 1)
    return Revolve(steps, slots=min(slots, max(steps, 1)))


def _residual_bytes(step: LoopStep, state: Any) -> int:
    first = jax.tree.map(lambda rows: rows[0], stacked_feed(step))
    index: Any = jnp.zeros((), jnp.int32)

    def pull_of(state: Any, given: Any) -> Any:
        def call(state_part: Any, given_part: Any) -> Any:
            after, output = step.run_on(
                merged(state, state_part), index, merged(given, given_part)
            )
            return inexact(after), inexact(output)

        return jax.vjp(call, inexact(state), inexact(given))[1]

    return _bytes_of(jax.eval_shape(pull_of, state, first))


def _bytes_of(tree: Any) -> int:
    return sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if hasattr(leaf, "dtype") and hasattr(leaf.dtype, "itemsize")
    )

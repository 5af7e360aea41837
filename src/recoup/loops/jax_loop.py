"""JAX loop: a schedule as a constant table, carried out inside one jitted program.

The actions become a table of integers that a `lax.scan` runs through. The table is a
constant, so under `vmap` no branch depends on a batched value, and the program does not
grow with the number of steps. The step is traced, so it cannot depend on anything but
its arguments and what it captures, and nothing has to be recognised in backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from recoup.core.errors import (
    CaptureError,
    MismatchError,
    UnsupportedError,
    UsageError,
)
from recoup.engine.captures import Captures as Variables
from recoup.loops.feeds import Stacked
from recoup.loops.jax_table import (
    KEEP,
    RESTORE,
    REVERSE_START,
    REVERSE_STOP,
    START,
    STOP,
    table,
)
from recoup.loops.jax_trees import (
    Tree,
    inexact,
    merged,
    row_at,
    slot_or,
    with_row,
    with_slot,
    zeros_like,
)
from recoup.loops.plans import Plan
from recoup.loops.slots import Checkpoints, Slots
from recoup.loops.steps import KindError, Step
from recoup.schedules.revolve import Revolve
from recoup.schedules.schedule import Schedule


def run_jax(
    step: Step, initial_state: Tree, plan: Plan, captures: Sequence[Any], vjp: Any
) -> tuple[Tree, Tree, Checkpoints]:
    """Run a loop on JAX arrays; works inside `jit`, `vmap` and `grad`.

    Costs `counts().evaluations` steps, one more for each step that shares a tape with
    others, and those of the last tape once more: a tape holds states, not residuals.

    Args:
        step: What to run.
        initial_state: Where to begin.
        plan: How to carry it out.
        captures: Not needed: JAX finds captured arrays by itself.
        vjp: Not needed: JAX differentiates by itself.

    Returns:
        The final state, the stacked outputs (None without), and the checkpoints.
    """
    if captures or vjp is not None:
        raise UsageError(
            "captures= and vjp= are not for JAX, which finds captured arrays and "
            "derivatives by itself. Leave them out."
        )
    state = jax.tree.map(jnp.asarray, initial_state)
    schedule = _schedule(step, state, plan)
    if schedule.steps == 0:
        return state, None, Checkpoints(Slots(), _same, _same)
    feed = stacked_feed(step)
    loop, constants = _closed(step, feed, state, schedule)
    run = partial(_run, loop)
    final, outputs, kept = run(state, constants, feed)
    slots = Slots()
    for slot, position in loop.positions.items():
        slots.put(slot, position, jax.tree.map(lambda rows, s=slot: rows[s], kept))

    def pull_back(cotangent: Tree) -> Tree:
        _, pull = jax.vjp(lambda begin: run(begin, constants, feed)[0], state)
        return pull(cotangent)[0]

    checkpoints = Checkpoints(
        slots, _sealed, pull_back, hidden=None if plan.shows_beginning else 0
    )
    return final, (outputs if step.with_outputs else None), checkpoints


@dataclass(frozen=True, slots=True)
class Loop:
    """What is constant about a loop.

    Attributes:
        call: One step: state, index, input and captured arrays to state and output.
        steps: How many there are.
        slots: How many states are held at most.
        chunk: How many steps are reversed at once at most.
        forward: The table up to the first reverse.
        backward: The rest.
        last: Where the first reverse begins.
        positions: For each slot of the first sweep, the step it is before.
    """

    call: Callable[..., tuple[Tree, Tree]]
    steps: int
    slots: int
    chunk: int
    forward: np.ndarray
    backward: np.ndarray
    last: int
    positions: dict[int, int]

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def _closed(
    step: Step, feed: Tree, state: Tree, schedule: Schedule
) -> tuple[Loop, list[Any]]:
    """Return the constant part of the loop, and the arrays its step captures."""

    def call(state: Tree, index: Any, given: Tree) -> tuple[Tree, Tree]:
        return step.run(state, index, given)

    bare = replace(step, feed=None)
    step = step if feed is not None else bare
    first = jax.tree.map(lambda rows: rows[0], feed)
    index = jnp.zeros((), jnp.int32)
    seen = Variables(step.function)
    _require_same_types(call, state, index, first, step.name)
    closed, constants = jax.closure_convert(call, state, index, first)
    try:
        seen.check(step.name)
    except CaptureError as error:
        raise MismatchError(
            f"{step.name!r} changes a variable that it captures. JAX traces a step "
            "once and runs that for all, so the change would happen once. Make it a "
            "part of the state, or ask for the index with with_index=True."
        ) from error
    rows, first_reverse, positions = table(schedule.actions())
    counts = schedule.counts()
    loop = Loop(
        call=lambda state, index, given, constants: closed(
            state, index, given, *constants
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


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(
    loop: Loop, state: Tree, constants: list[Any], feed: Tree
) -> tuple[Tree, Tree, Tree]:
    results, _ = _forward(loop, state, constants, feed)
    return results


def _forward(
    loop: Loop, state: Tree, constants: list[Any], feed: Tree
) -> tuple[tuple[Tree, Tree, Tree], Tree]:
    """Sweep forward; return final state, outputs and checkpoints, and the residuals."""
    index = jnp.zeros((), jnp.int32)
    _, output = jax.eval_shape(loop.call, state, index, row_at(feed, 0), constants)
    outputs = jax.tree.map(
        lambda leaf: jnp.zeros((loop.steps, *leaf.shape), leaf.dtype), output
    )
    kept = jax.tree.map(
        lambda leaf: jnp.zeros((loop.slots, *leaf.shape), leaf.dtype), state
    )

    def advance(index: Any, carry: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        state, outputs = carry
        state, output = loop.call(state, index, row_at(feed, index), constants)
        return state, with_row(outputs, index, output)

    def row(carry: Any, actions: Any) -> tuple[Any, None]:
        state, outputs, kept = carry
        state, outputs = lax.fori_loop(
            actions[START], actions[STOP], advance, (state, outputs)
        )
        kept = with_slot(kept, actions[KEEP], state)
        return (state, outputs, kept), None

    carry = (state, outputs, kept)
    (before, outputs, kept), _ = lax.scan(row, carry, jnp.asarray(loop.forward))
    final, outputs = lax.fori_loop(loop.last, loop.steps, advance, (before, outputs))
    return (final, outputs, kept), (before, kept, constants, feed)


def _backward(loop: Loop, residuals: Tree, cotangents: Tree) -> Tree:
    before, kept, constants, feed = residuals
    cotangent, output_cotangents, _ = cotangents
    pull = partial(_pull, loop, constants, feed, output_cotangents)
    found = (
        inexact(cotangent),
        zeros_like(inexact(constants)),
        zeros_like(inexact(feed)),
    )

    def advance(index: Any, state: Tree) -> Tree:
        return loop.call(state, index, row_at(feed, index), constants)[0]

    def row(carry: Any, actions: Any) -> tuple[Any, None]:
        state, kept, found = carry
        state = slot_or(kept, actions[RESTORE], state)
        state = lax.fori_loop(actions[START], actions[STOP], advance, state)
        kept = with_slot(kept, actions[KEEP], state)
        found = lax.cond(
            actions[REVERSE_STOP] > actions[REVERSE_START],
            partial(_reverse, loop, advance, pull),
            lambda _state, _actions, found: found,
            state,
            actions,
            found,
        )
        return (state, kept, found), None

    carry = (before, kept, found)
    (_, _, found), _ = lax.scan(row, carry, jnp.asarray(loop.backward))
    state_found, constants_found, feed_found = found
    return (
        merged(before, state_found),
        merged(constants, constants_found),
        merged(feed, feed_found),
    )


_run.defvjp(_forward, _backward)


def _reverse(
    loop: Loop, advance: Any, pull: Any, state: Tree, actions: Any, found: Any
) -> Any:
    """Pull back through the steps of one reverse, from the last to the first."""
    start, stop = actions[REVERSE_START], actions[REVERSE_STOP]
    if loop.chunk == 1:
        return pull(start, state, found)
    states = jax.tree.map(
        lambda leaf: jnp.zeros((loop.chunk, *leaf.shape), leaf.dtype), state
    )

    def fill(index: Any, carry: Any) -> Any:
        states, state = carry
        return with_row(states, index - start, state), advance(index, state)

    states, state = lax.fori_loop(start, stop - 1, fill, (states, state))
    states = with_row(states, stop - 1 - start, state)

    def unroll(count: Any, found: Any) -> Any:
        index = stop - 1 - count
        return pull(index, row_at(states, index - start), found)

    return lax.fori_loop(0, stop - start, unroll, found)


def _pull(  # noqa: PLR0913 (bound one by one by the caller)
    loop: Loop,
    constants: list[Any],
    feed: Tree,
    output_cotangents: Tree,
    index: Any,
    state: Tree,
    found: Any,
) -> Any:
    """Pull back through one step."""
    cotangent, constants_found, feed_found = found
    given = row_at(feed, index)

    def call(state_part: Any, constants_part: Any, given_part: Any) -> Any:
        after, output = loop.call(
            merged(state, state_part),
            index,
            merged(given, given_part),
            merged(constants, constants_part),
        )
        return inexact(after), inexact(output), constants_part

    parts = (inexact(state), inexact(constants), inexact(given))
    _, pull = jax.vjp(call, *parts)
    row = row_at(inexact(output_cotangents), index)
    # The sums so far go in as gradients that have arrived already, so that each use of
    # a captured array is added in the order of the plain scan.
    state_part, constants_part, given_part = pull((cotangent, row, constants_found))
    return state_part, constants_part, with_row(feed_found, index, given_part)


def _schedule(step: Step, state: Tree, plan: Plan) -> Schedule:
    """Return the schedule; a loop with a condition is run once to learn its length."""
    if plan.schedule is not None:
        return plan.schedule
    assert plan.condition is not None, "no schedule, so a condition"
    assert plan.online is not None, "a condition comes with an online schedule"
    call = jax.jit(lambda state, index, given: step.run(state, index, given)[0])
    index = 0
    state = lax.stop_gradient(state)
    try:
        while index != plan.most_steps and bool(plan.condition(state)):
            given = None if step.feed is None else step.feed.at(index)
            state = call(state, index, given)
            index += 1
    except jax.errors.ConcretizationTypeError as error:
        raise UnsupportedError(
            "a JAX loop whose length depends on its values cannot be checkpointed "
            "inside jit, because its table is made beforehand. Call it outside of jit, "
            "or give seq_length."
        ) from error
    return Revolve(index, slots=plan.online.slots)


def stacked_feed(step: Step) -> Tree:
    """Return the inputs of all steps as arrays whose first axis is the step."""
    if step.feed is None:
        return None
    if isinstance(step.feed, Stacked):
        return jax.tree.map(jnp.asarray, step.feed.whole())
    trees = [step.feed.at(index) for index in range(step.feed.length)]
    return jax.tree.map(lambda *rows: jnp.stack(rows), *trees)


def _require_same_types(
    call: Any, state: Tree, index: Any, first: Tree, name: str
) -> None:
    after, _ = jax.eval_shape(call, state, index, first)
    before = jax.eval_shape(lambda: state)
    if jax.tree.structure(after) != jax.tree.structure(before):
        raise KindError(
            f"{name!r} returned a state that is built otherwise than the initial one. "
            "Return the same structure, as in a scan."
        )
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise UsageError(
                f"{name!r} turned an array of shape {old.shape} and type {old.dtype} "
                f"into one of shape {new.shape} and type {new.dtype}. Begin with the "
                "shape and type that it returns."
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
        "a derivative is asked of a checkpoint of a loop, which is a value alone. Let "
        "the step return it as an output with with_outputs=True, or say "
        "jax.lax.stop_gradient(checkpoints[position])."
    )


_sealed.defvjp(_seal, _break_seal)

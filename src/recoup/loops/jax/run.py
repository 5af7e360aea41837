"""Forward and backward sweeps of a JAX loop, driven by its table.

Forward runs the rows up to the first reverse and leaves the state before it and the
checkpoints as residuals; backward runs the other rows: restore, advance, keep, reverse.
A tape holds states, not residuals, so each step is traced again where it is pulled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from recoup.loops.jax.rows import (
    Tree,
    inexact,
    merged,
    row_at,
    slot_or,
    with_row,
    with_slot,
    zeros_like,
)
from recoup.loops.jax.table import (
    KEEP,
    RESTORE,
    REVERSE_START,
    REVERSE_STOP,
    START,
    STOP,
)


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


def run(
    loop: Loop, state: Tree, constants: list[Any], feed: Tree
) -> tuple[Tree, Tree, Tree]:
    """Carry out a loop; its derivative is the backward sweep.

    Args:
        loop: What is constant about it.
        state: Where to begin.
        constants: The arrays that its step captures.
        feed: The inputs of all steps, the step being the first axis; None without.

    Returns:
        The final state, the stacked outputs, and the states held after the first sweep.
    """
    results: Any = _swept(loop, state, constants, feed)
    return results


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _swept(loop: Loop, state: Tree, constants: list[Any], feed: Tree) -> Any:
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
    """Sweep backward; return the gradients of state, constants and feed."""
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


_swept.defvjp(_forward, _backward)


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

"""Forward and backward sweeps of a JAX loop, driven by its table.

Forward runs the rows up to the first reverse and leaves the state before it and the
checkpoints as residuals; backward runs the other rows: restore, advance, keep, reverse.
A tape holds states, not residuals, so each step is traced again in its pull back.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from recoup.schedules.schedule import Action, Advance, Restore, Reverse, Snapshot

# The columns of the table; -1 in a slot means no action.
RESTORE, START, STOP, KEEP, REVERSE_START, REVERSE_STOP = range(6)


def table(actions: Iterable[Action]) -> tuple[np.ndarray, int, dict[int, int]]:
    """Return rows of restore, advance, snapshot, reverse; and the first reverse's row.

    A row does its four parts in this order, so that most rows cover two actions.
    """
    rows: list[list[int]] = []
    positions: dict[int, int] = {}
    reached = 0  # the last part that is used in the last row
    first_reverse = -1

    def part(number: int) -> list[int]:
        nonlocal reached
        if not rows or number <= reached:
            rows.append([-1, 0, 0, -1, 0, 0])
        reached = number
        return rows[-1]

    for action in actions:
        match action:
            case Restore(_, slot):
                part(1)[RESTORE] = slot
            case Advance(start, stop):
                part(2)[START : STOP + 1] = start, stop
            case Snapshot(step, slot):
                part(3)[KEEP] = slot
                if first_reverse < 0:
                    positions[slot] = step
            case Reverse(start, stop):
                if first_reverse < 0:
                    first_reverse, reached = len(rows), 5
                part(4)[REVERSE_START:] = start, stop
    return np.array(rows, np.int32).reshape(-1, 6), first_reverse, positions


Tree = Any


def inexact(tree: Tree) -> list[Any]:
    """Return the leaves that have derivatives."""
    return [leaf for leaf in jax.tree.leaves(tree) if has_derivative(leaf)]


def merged(tree: Tree, parts: Sequence[Any]) -> Tree:
    """Return the tree with its leaves that have derivatives replaced."""
    leaves, structure = jax.tree.flatten(tree)
    rest = iter(parts)
    merged = [next(rest) if has_derivative(leaf) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, merged)


def has_derivative(leaf: Any) -> bool:
    """Return whether a leaf has derivatives."""
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def zeros_like(tree: Tree) -> Tree:
    """Return zeros for every leaf."""
    return jax.tree.map(jnp.zeros_like, tree)


def empty_rows(tree: Tree, count: int) -> Tree:
    """Return zeros for `count` rows of every leaf."""
    return jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), tree)


def row_at(tree: Tree, index: Any) -> Tree:
    """Return one row of every leaf."""
    return jax.tree.map(
        lambda rows: lax.dynamic_index_in_dim(rows, index, keepdims=False), tree
    )


def with_row(tree: Tree, index: Any, part: Tree) -> Tree:
    """Return the tree with one row of every leaf replaced."""
    return jax.tree.map(
        lambda rows, row: lax.dynamic_update_index_in_dim(rows, row, index, 0),
        tree,
        part,
    )


def with_slot(kept: Tree, slot: Any, state: Tree) -> Tree:
    """Write the state to a slot; to none if the slot is -1.

    Without a branch, because a branch would copy all slots.
    """

    def write(rows: Any, row: Any) -> Any:
        place = jnp.maximum(slot, 0)
        old = lax.dynamic_index_in_dim(rows, place, keepdims=False)
        new = jnp.where(slot >= 0, row, old)
        return lax.dynamic_update_index_in_dim(rows, new, place, 0)

    return jax.tree.map(write, kept, state)


def slot_or(kept: Tree, slot: Any, state: Tree) -> Tree:
    """Return the state in a slot; the current one if the slot is -1."""

    def read(rows: Any, current: Any) -> Any:
        old = lax.dynamic_index_in_dim(rows, jnp.maximum(slot, 0), keepdims=False)
        return jnp.where(slot >= 0, old, current)

    return jax.tree.map(read, kept, state)


@dataclass(frozen=True, slots=True, eq=False)
class LoopProgram:
    """The constant part of a loop; JAX compares and hashes it by identity.

    Attributes:
        call: One step: state, index, input and captured arrays to state and output.
        steps: The number of steps.
        slots: The maximum number of held states.
        chunk: The maximum number of steps reversed together.
        forward: The table up to the first reverse.
        backward: The rest.
        last: The start of the first reverse.
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


def run(
    loop: LoopProgram, state: Tree, constants: list[Any], feed: Tree
) -> tuple[Tree, Tree, Tree]:
    """Carry out a loop; its derivative is the backward sweep.

    Returns:
        The final state, the stacked outputs, and the states held after the first sweep.
    """
    results: Any = _swept(loop, state, constants, feed)
    return results


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _swept(loop: LoopProgram, state: Tree, constants: list[Any], feed: Tree) -> Any:
    results, _ = _forward(loop, state, constants, feed)
    return results


def _forward(
    loop: LoopProgram, state: Tree, constants: list[Any], feed: Tree
) -> tuple[tuple[Tree, Tree, Tree], Tree]:
    """Sweep forward; return final state, outputs and checkpoints, and the residuals."""
    index = jnp.zeros((), jnp.int32)
    _, output = jax.eval_shape(loop.call, state, index, row_at(feed, 0), constants)
    outputs, kept = empty_rows(output, loop.steps), empty_rows(state, loop.slots)

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


def _backward(loop: LoopProgram, residuals: Tree, cotangents: Tree) -> Tree:
    """Sweep backward; return the gradients of state, constants and feed."""
    before, kept, constants, feed = residuals
    cotangent, output_cotangents, _ = cotangents
    found = (
        inexact(cotangent),
        zeros_like(inexact(constants)),
        zeros_like(inexact(feed)),
    )

    def advance(index: Any, state: Tree) -> Tree:
        return loop.call(state, index, row_at(feed, index), constants)[0]

    def pull(index: Any, state: Tree, found: Any) -> Any:
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

        _, back = jax.vjp(call, inexact(state), inexact(constants), inexact(given))
        row = row_at(inexact(output_cotangents), index)
        # The sums so far enter as gradients that have already arrived, so that uses of
        # a captured array are summed in the order of the plain scan.
        state_part, constants_part, given_part = back((cotangent, row, constants_found))
        return state_part, constants_part, with_row(feed_found, index, given_part)

    def reverse(state: Tree, actions: Any, found: Any) -> Any:
        """Pull back through the steps of one reverse, from the last to the first."""
        start, stop = actions[REVERSE_START], actions[REVERSE_STOP]
        if loop.chunk == 1:
            return pull(start, state, found)

        def fill(index: Any, carry: Any) -> Any:
            states, state = carry
            return with_row(states, index - start, state), advance(index, state)

        carry = (empty_rows(state, loop.chunk), state)
        states, state = lax.fori_loop(start, stop - 1, fill, carry)
        states = with_row(states, stop - 1 - start, state)

        def unroll(count: Any, found: Any) -> Any:
            index = stop - 1 - count
            return pull(index, row_at(states, index - start), found)

        return lax.fori_loop(0, stop - start, unroll, found)

    def row(carry: Any, actions: Any) -> tuple[Any, None]:
        state, kept, found = carry
        state = slot_or(kept, actions[RESTORE], state)
        state = lax.fori_loop(actions[START], actions[STOP], advance, state)
        kept = with_slot(kept, actions[KEEP], state)
        found = lax.cond(
            actions[REVERSE_STOP] > actions[REVERSE_START],
            reverse,
            lambda _state, _actions, found: found,
            state,
            actions,
            found,
        )
        return (state, kept, found), None

    carry = (before, kept, found)
    (_, _, found), _ = lax.scan(row, carry, jnp.asarray(loop.backward))
    return tuple(map(merged, (before, constants, feed), found))


_swept.defvjp(_forward, _backward)

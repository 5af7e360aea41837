"""JAX trees: rows of stacked arrays, and the leaves that have derivatives."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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

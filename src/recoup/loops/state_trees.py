"""Trees: nested states flattened into leaves and rebuilt.

Faster than a registry of node types, since a loop does this at every snapshot: tuples,
named tuples, lists and dictionaries are nodes, everything else is a leaf.
"""

from collections.abc import Iterator
from typing import Any

Structure = Any
"""The structure of a pytree, comparable and opaque."""

_LEAF = None


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of a tree, in order, and its structure.

    Examples:
        >>> leaves, structure = flatten({"h": 1, "rest": (2, [3])})
        >>> leaves
        [1, 2, 3]
        >>> unflatten(structure, [10, 20, 30])
        {'h': 10, 'rest': (20, [30])}
    """
    if not isinstance(tree, (tuple, list, dict)):
        return [tree], _LEAF
    leaves: list[Any] = []
    return leaves, _take_apart(tree, leaves)


def unflatten(structure: Structure, leaves: list[Any]) -> Any:
    """Return the tree of this structure with these leaves."""
    if structure is _LEAF:
        return leaves[0]
    return _put_together(structure, iter(leaves))


def _take_apart(tree: Any, leaves: list[Any]) -> Structure:
    kind = type(tree)
    if kind is tuple or kind is list or _is_named_tuple(tree):
        return kind, None, tuple([_take_apart(child, leaves) for child in tree])
    if kind is dict:
        names = tuple(tree)
        return kind, names, tuple([_take_apart(tree[name], leaves) for name in names])
    leaves.append(tree)
    return _LEAF


def _put_together(structure: Structure, leaves: Iterator[Any]) -> Any:
    if structure is _LEAF:
        return next(leaves)
    kind, names, children = structure
    parts = [_put_together(child, leaves) for child in children]
    if kind is list:
        return parts
    if kind is tuple:
        return tuple(parts)
    if kind is dict:
        return dict(zip(names, parts, strict=True))
    return kind(*parts)


def _is_named_tuple(tree: Any) -> bool:
    return isinstance(tree, tuple) and hasattr(tree, "_fields")

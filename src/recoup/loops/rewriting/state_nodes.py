"""Nodes: the containers and leaves of a state, one by one, and whether they change."""

import gc
import sys
from collections.abc import Iterable, Iterator, MappingView
from numbers import Number
from typing import Any

from torch import Tensor

from recoup.backend.memory.storages import has_storage, storage_address, version_of
from recoup.backend.state.walk import reach

_MOST_SOURCES = 1000


class Undefined:
    """Stands for a variable that has no value yet."""


def nodes_of(trees: Iterable[Any]) -> list[Any]:
    """Return the containers and leaves of some trees, each before what is in it.

    Examples:
        >>> nodes_of([{"a": 1}, [2]])
        [{'a': 1}, 1, [2], 2]
    """
    found: list[Any] = []
    for tree in trees:
        _gather(tree, found)
    return found


def is_mutable(node: Any) -> bool:
    """Return whether a node can be written to: a tensor, an array or a container."""
    return isinstance(node, Tensor) or type(node) in (list, dict) or _is_numpy(node)


def is_known(leaf: Any) -> bool:
    """Return whether a leaf is a tensor or an array, or cannot be written to."""
    if isinstance(leaf, (Tensor, Number, str, bytes, type(None), Undefined)):
        return True
    # Arrays of other libraries, traced ones too, cannot be written to.
    return hasattr(leaf, "dtype")


def mark_of(node: Any) -> Any:
    """Return what differs after a node has been written to.

    The children of a container must be kept alive meanwhile. Costs a copy of a NumPy
    array.
    """
    if isinstance(node, Tensor):
        return version_of(node)
    if type(node) is list:
        return tuple(map(id, node))
    if type(node) is dict:
        return tuple(node), tuple(map(id, node.values()))
    return node.tobytes() if _is_numpy(node) else None


def memory_of(node: Any) -> int:
    """Return the identity of the memory that a node is written in."""
    if isinstance(node, Tensor) and has_storage(node):
        return storage_address(node)
    base: Any = node
    while _is_numpy(base) and base.base is not None:
        base = base.base
    return id(base)


def copied(tree: Any, *, tensors_too: bool) -> Any:
    """Return a tree of new containers and arrays, so that the old stay as they are.

    Args:
        tree: What to copy.
        tensors_too: Copy tensors as well, with their graph.
    """
    if type(tree) is list:
        return [copied(part, tensors_too=tensors_too) for part in tree]
    if type(tree) is dict:
        return {k: copied(part, tensors_too=tensors_too) for k, part in tree.items()}
    if isinstance(tree, tuple):
        parts = [copied(part, tensors_too=tensors_too) for part in tree]
        named = hasattr(tree, "_fields")
        return type(tree)(*parts) if named else type(tree)(parts)
    if isinstance(tree, Tensor):
        return tree.clone() if tensors_too else tree
    return tree.copy() if _is_numpy(tree) else tree


def containers_in(things: Iterable[Any]) -> set[int]:
    """Return the `id` of every list and dictionary in sight of some objects."""
    return {id(each) for each in reach(*things, kind=(list, dict))}


def sources_of(items: Any) -> list[Any]:
    """Return what an iterator takes its elements from.

    Examples:
        >>> values = [1, 2]
        >>> any(source is values for source in sources_of(enumerate(zip(values))))
        True
    """
    found: list[Any] = []
    waiting = [items]
    while waiting and len(found) < _MOST_SOURCES:
        thing = waiting.pop()
        if isinstance(thing, (Iterator, MappingView, tuple)):
            waiting.extend(gc.get_referents(thing))
        else:
            found.append(thing)
    return found


def _gather(tree: Any, found: list[Any]) -> None:
    found.append(tree)
    if type(tree) is dict:
        for part in tree.values():
            _gather(part, found)
    elif type(tree) is list or isinstance(tree, tuple):
        for part in tree:
            _gather(part, found)


def _is_numpy(node: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(node, numpy.ndarray)

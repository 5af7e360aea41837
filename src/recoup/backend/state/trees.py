"""Pytrees of arguments and results: find their tensors, rebuild them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from recoup.backend.state.walk import attributes_of, slots_of


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of a pytree, in order.

    Examples:
        >>> leaves({"a": (1, [2]), "b": None})
        [1, 2, None]
    """
    return _pytree.tree_leaves(tree)


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a pytree, in order."""
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def bytes_in(tree: Any) -> int:
    """Return the bytes of the tensors and arrays of a pytree.

    Arrays are objects with an integer `nbytes`, such as NumPy's.

    Examples:
        >>> import numpy as np
        >>> bytes_in([torch.zeros(3), {"a": np.zeros(2)}, 7, "text"])
        28
    """
    total = 0
    for leaf in _pytree.tree_leaves(tree):
        with suppress(RuntimeError):  # sparse tensors have no `nbytes`
            size = getattr(leaf, "nbytes", 0)
            total += size if isinstance(size, int) else 0
    return total


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return the pytree with `change` applied to every leaf."""
    return _pytree.tree_map(change, tree)


_MOST_OBJECTS = 1000
"""The most objects, other than tensors, that are searched: a batch has few."""

_DEPTH = 8

_DULL = (
    *(str, bytes, int, float, complex, type(None), type, slice, range),
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType),
    *(torch.dtype, torch.device, torch.Size, torch.Generator, nn.Module),
)


def named_tensors(
    tree: Any, *, kinds: tuple[type, ...] = (Tensor,)
) -> list[tuple[str, Any]]:
    """Return the tensors of a batch with their paths, each tensor once.

    Unlike `tensors` it searches any object, such as a dataclass, a mapping that is no
    dictionary, or a graph of PyTorch Geometric. Modules are not part of a batch.

    Args:
        tree: The batch.
        kinds: The types to find; their contents are not searched.

    Examples:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Batch:
        ...     ids: Tensor
        >>> ids = torch.ones(2)
        >>> named_tensors(((Batch(ids), 1), {"mask": ids > 0}))
        [('1.mask', tensor([True, True])), ('0.0.ids', tensor([1., 1.]))]
    """
    found: dict[int, tuple[str, Any]] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, Any, int]] = [("", tree, 0)]
    for path, thing, depth in waiting:
        if isinstance(thing, kinds):
            found.setdefault(id(thing), (path, thing))
        elif not isinstance(thing, _DULL) and id(thing) not in seen:
            seen.add(id(thing))
            if depth < _DEPTH and len(seen) <= _MOST_OBJECTS:
                start = f"{path}." if path else ""
                waiting += [
                    (f"{start}{name}", part, depth + 1) for name, part in _parts(thing)
                ]
    return list(found.values())


def tensors_within(tree: Any) -> list[Tensor]:
    """Return the tensors of a batch, including those in attributes of objects."""
    return [tensor for _, tensor in named_tensors(tree)]


def _parts(thing: Any) -> Iterator[tuple[object, Any]]:
    if isinstance(thing, dict | Mapping):
        yield from list(thing.items())
    elif isinstance(thing, tuple | list | set | frozenset):
        yield from enumerate(thing)
    else:
        yield from list(attributes_of(thing).items())
        for slot in slots_of(type(thing)):
            try:
                yield slot.__name__, slot.__get__(thing, type(thing))
            except AttributeError:
                continue  # an unset slot

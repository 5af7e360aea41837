"""Nested arguments and results: find the tensors in them, rebuild them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of a nested structure, in order.

    Examples:
        >>> leaves({"a": (1, [2]), "b": None})
        [1, 2, None]
    """
    return _pytree.tree_leaves(tree)


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors of a nested structure, in order."""
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return the structure with every leaf changed."""
    return _pytree.tree_map(change, tree)

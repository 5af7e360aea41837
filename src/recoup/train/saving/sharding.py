"""Tensors that are sharded over processes: made whole, and sharded again."""

from typing import Any

from torch import Tensor

from recoup.backend.state.trees import map_leaves


def whole(tensor: Any) -> Any:
    """Return a sharded tensor as one on every process; anything else as it is.

    All processes must call it together for a sharded one.
    """
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def whole_tree(tree: Any) -> Any:
    """Return a tree with its tensors detached and whole, sharded ones on the CPU."""

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.detach()
        return whole(leaf).cpu() if hasattr(leaf, "full_tensor") else leaf

    return map_leaves(change, tree)


def shard_like(own: Any, value: Any) -> Any:
    """Return a whole tensor sharded as another of its shape; otherwise as it is."""
    if not isinstance(value, Tensor) or not hasattr(own, "full_tensor"):
        return value
    if value.shape != own.shape:
        return value
    # Slow to import, and needed only where it has been imported already.
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements)

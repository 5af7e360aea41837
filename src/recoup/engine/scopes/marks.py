"""Marks: choose for one tensor whether it is kept or recomputed."""

from torch import Tensor

from recoup.backend.memory.storages import TensorSet, has_storage
from recoup.engine.lifetime.values import OUTSIDE, TapeValue
from recoup.engine.recording.active import open_regions
from recoup.engine.recording.region import Region
from recoup.engine.scopes.policies import check_store
from recoup.engine.tiers.protocol import Tier
from recoup.errors import UsageError

_MARKED = TensorSet()


def keep(tensor: Tensor, *, store: Tier | None = None) -> Tensor:
    """Keep this tensor: replays start from it instead of recomputing it.

    Inside regions, nested ones included, the tensor is held until backward. Outside of
    regions it is only marked. A kept tensor that neither backward nor a replay needs is
    not held.

    Args:
        tensor: Any tensor.
        store: The tier that keeps it, such as `Host()`; by default the regions' tier.

    Returns:
        The same tensor, so that calls can be chained.

    Raises:
        UsageError: The argument is no tensor, or the store no tier.

    Examples:
        >>> import torch
        >>> t = torch.ones(2)
        >>> keep(t) is t, is_checkpoint(t), is_checkpoint(torch.ones(2))
        (True, True, False)
    """
    _require_tensor("keep", tensor)
    check_store(store)
    _MARKED.add(tensor)
    for region, value in _known(tensor):
        region.tape.forced.discard(value)
        region.keep(value, tensor, store)
    return tensor


mark_checkpoint = keep
"""MLFramework's name for `keep`: the tensor is a checkpoint from which others are
recomputed."""


def is_checkpoint(tensor: Tensor) -> bool:
    """Return whether this tensor object was marked with `keep`."""
    return isinstance(tensor, Tensor) and tensor in _MARKED


def unmark_checkpoint(tensor: Tensor) -> Tensor:
    """Remove the mark from a tensor, and let open regions recompute it.

    Returns:
        The same tensor.
    """
    _require_tensor("unmark_checkpoint", tensor)
    _MARKED.discard(tensor)
    for region, value in _known(tensor):
        if value.producer != OUTSIDE and region.options.recompute:
            value.drop_hold()
    return tensor


def checkpoint_count() -> int:
    """Return the number of marked tensors that are alive."""
    return len(_MARKED)


def clear_checkpoint_marks() -> None:
    """Remove all marks."""
    _MARKED.clear()


def recompute(tensor: Tensor) -> Tensor:
    """Drop this tensor between forward and backward, and recompute it there.

    The innermost open scope must have recorded how it was computed. A plain
    `CheckpointScope` does this for every tensor; in a scope with
    `use_recomputation=False` or a policy, this makes an exception for one tensor.

    Does nothing without gradients, in inference mode, outside of enabled scopes, and
    for a tensor that the scope did not compute. So a model with marks can be evaluated,
    frozen and run without scopes.

    Args:
        tensor: A tensor that was computed in the innermost open scope.

    Returns:
        The same tensor.

    Raises:
        UsageError: The argument is not a tensor.

    Examples:
        >>> import torch
        >>> from recoup import CheckpointScope
        >>> x = torch.ones(4, requires_grad=True)
        >>> with CheckpointScope("example", use_recomputation=False):
        ...     z = recompute(torch.relu(x * 2))
        >>> z.sum().backward()
        >>> x.grad
        tensor([2., 2., 2., 2.])
    """
    _require_tensor("recompute", tensor)
    _MARKED.discard(tensor)
    regions = open_regions()
    if regions and has_storage(tensor):
        tape = regions[-1].tape
        value = tape.value_of(tensor)
        if value is not None and value.producer != OUTSIDE:
            tape.forced.add(value)
            value.drop_hold()
    return tensor


def adaptive_checkpoint(tensor: Tensor, threshold: int) -> Tensor:
    """Recompute the tensor if it is larger than a threshold in bytes.

    Like `recompute`, it does nothing if there is nothing to drop.

    Args:
        tensor: A tensor computed in an open scope.
        threshold: The size in bytes up to which tensors are unaffected.

    Returns:
        The same tensor.

    Raises:
        UsageError: The threshold is not a non-negative integer, or the first argument
            is not a tensor.

    Examples:
        >>> import torch
        >>> small = torch.ones(2, 2)
        >>> adaptive_checkpoint(small, 10 * 1024) is small
        True
    """
    _require_tensor("adaptive_checkpoint", tensor)
    if isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 0:
        raise UsageError(
            f"expected a threshold in bytes, zero or more, got {threshold!r}."
        )
    is_large = has_storage(tensor) and tensor.nbytes > threshold
    return recompute(tensor) if is_large else tensor


def _known(tensor: Tensor) -> list[tuple[Region, TapeValue]]:
    if not has_storage(tensor):
        return []
    pairs = [(region, region.tape.value_of(tensor)) for region in open_regions()]
    return [(region, value) for region, value in pairs if value is not None]


def _require_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise UsageError(f"{name} expected a tensor, got {type(tensor).__name__}.")

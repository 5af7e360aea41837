"""Batches: their samples, moving, splitting, and the loss of a model on them."""

import itertools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recoup.backend.state.trees import map_leaves, tensors
from recoup.core.callers import calls_user
from recoup.errors import UsageError
from recoup.measurement.steps.training_step import call_model, loss_in

LossFunction = Callable[[Any, Any], Tensor]
"""Called as `loss_fn(outputs, targets)`; returns a mean over the samples."""


def sample_count(batch: Any) -> int | None:
    """Return the number of samples of a batch: the common length of its tensors.

    Returns:
        The count, or None if the tensors do not agree on one.

    Examples:
        >>> sample_count((torch.ones(4, 2), {"labels": torch.ones(4)}))
        4
        >>> sample_count((torch.ones(4, 2), torch.ones(3))) is None
        True
    """
    found = tensors_in(batch)
    counts = {tensor.shape[0] if tensor.dim() else None for tensor in found}
    return counts.pop() if len(counts) == 1 else None


def batch_size(batch: Any) -> int:
    """Return the number of samples of a batch, or the best guess.

    If its tensors do not agree, as inputs of (samples, tokens) and flat targets of all
    tokens, the first tensor with a nonzero length decides. A batch without such a
    tensor is one sample.

    Examples:
        >>> batch_size((torch.ones(4, 6), torch.ones(24)))
        4
        >>> batch_size((torch.ones(0, 6), torch.ones(0)))
        0
    """
    lengths = [tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()]
    return next(filter(None, lengths), 0 if lengths else 1)


def has_samples(batch: Any) -> bool:
    """Return whether a batch has any sample; fast, since it runs for every batch.

    Examples:
        >>> has_samples((torch.ones(1, 6), "a")), has_samples((torch.ones(0, 6), "a"))
        (True, False)
    """
    first = batch
    while type(first) in (tuple, list) and first:
        first = first[0]
    if isinstance(first, Tensor) and first.shape and first.shape[0]:
        return True
    return batch_size(batch) > 0


def split_batch(batch: Any, pieces: int) -> list[Any]:
    """Split a batch along its samples into pieces of about equal size, without copies.

    Lists of names or numbers with one item per sample are split too.

    Raises:
        UsageError: It has no samples to split along, or fewer than pieces.

    Examples:
        >>> [piece.tolist() for piece in split_batch(torch.arange(5), 2)]
        [[0, 1, 2], [3, 4]]
    """
    count = sample_count(batch)
    if count is None or count < pieces:
        raise UsageError(
            f"expected a batch that can be split into {pieces}, got "
            + (
                "tensors of different lengths."
                if count is None
                else f"{count} samples."
            )
        )
    bounds = [-(-count * piece // pieces) for piece in range(pieces + 1)]

    def is_list(part: Any) -> bool:
        listed = isinstance(part, list | tuple) and len(part) == count
        return listed and not tensors_in(part)

    def rows(start: int, stop: int, leaf: Any) -> Any:
        return leaf[start:stop] if isinstance(leaf, Tensor) or is_list(leaf) else leaf

    return [
        _map(partial(rows, start, stop), batch, is_list)
        for start, stop in itertools.pairwise(bounds)
    ]


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a batch, asynchronously from pinned memory.

    Other objects with a method `to`, such as a batch of graphs, are moved too.
    """
    found = tensors_in(batch)
    if {tensor.device for tensor in found} == {device}:
        return batch

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=True) if leaf.device != device else leaf
        return leaf.to(device) if _can_move(leaf) else leaf

    return _map(move, batch, _can_move)


@calls_user
def compute_loss(
    model: nn.Module, batch: Any, loss_fn: LossFunction | None = None
) -> Tensor:
    """Return the loss of a model on a batch.

    With a loss function the batch is a pair: the arguments of the model, and the second
    argument of the loss function. Without one the model is called with the whole batch
    and returns the loss, or an object with a `loss` in it. A tuple is passed as
    positional arguments, a mapping as keywords.

    Raises:
        UsageError: The batch is not a pair, or the loss is not a single number.

    Examples:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> batch = (torch.ones(3, 2), torch.zeros(3, 1))
        >>> compute_loss(model, batch, nn.functional.mse_loss).item()
        4.0
    """
    if loss_fn is None:
        return _as_loss(call_model(model, batch))
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise UsageError(
            "expected a pair of inputs and targets, because of loss_fn, got "
            f"{_describe(batch)}; return pairs from the loader, or leave loss_fn out "
            "and let the model return its loss."
        )
    inputs, targets = batch
    return _as_loss(loss_fn(call_model(model, inputs), targets))


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch.

    torch's own walk of pytrees is general, slow, and leaves a reference cycle behind
    each time.
    """
    if isinstance(batch, Tensor):
        return [batch]
    if type(batch) in (tuple, list):
        return [tensor for part in batch for tensor in tensors_in(part)]
    if isinstance(batch, Mapping):
        return [tensor for part in batch.values() for tensor in tensors_in(part)]
    return tensors(batch)


def _map(
    change: Callable[[Any], Any], batch: Any, is_leaf: Callable[[Any], bool]
) -> Any:
    """Return a batch in the same structure, with its leaves changed.

    Mappings of any class are walked: torch's own walk stops at those of transformers.
    """
    if isinstance(batch, Mapping):
        parts = {key: _map(change, part, is_leaf) for key, part in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return parts
        changed = copy(batch)
        changed.update(parts)
        return changed
    if is_leaf(batch):
        return change(batch)
    if type(batch) in (tuple, list):
        return type(batch)(_map(change, part, is_leaf) for part in batch)
    return map_leaves(change, batch)


def _as_loss(result: Any) -> Tensor:
    loss = loss_in(result)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(
            f"expected a loss of one element, got {_describe(loss)}; reduce it to a "
            "mean over the samples."
        )
    return loss


def _can_move(leaf: Any) -> bool:
    return callable(getattr(leaf, "to", None))


def _describe(thing: Any) -> str:
    if isinstance(thing, Tensor):
        return f"a tensor of shape {tuple(thing.shape)}"
    size = f" of {len(thing)}" if isinstance(thing, Sequence | Mapping) else ""
    return f"a {type(thing).__name__}{size}"

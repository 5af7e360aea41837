"""Reduction: how a loss reduces a batch and its parts to one number; checked once."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recoup.backend.state.rng import (
    random_states,
    restore_random_states,
    same_random_states,
)
from recoup.errors import UsageError
from recoup.train.data.batches import (
    LossFunction,
    batch_size,
    has_samples,
    sample_count,
    split_batch,
)

WeightFunction = Callable[[Any], float]
"""Called with a batch; returns its weight among the batches of a step."""

_IGNORED = -100
"""The class that torch and transformers leave out of the mean by default."""

_WHOLE = frozenset({torch.int64, torch.int32, torch.int16, torch.int8})


@dataclass(frozen=True, slots=True)
class Reduction:
    """How the loss of a batch follows from the losses of its parts.

    Attributes:
        weight_fn: The weight of a batch in the mean.
        sums: Whether the losses of the parts are summed, without weights.
        is_known: Whether it is torch's own, which needs no check.

    Examples:
        >>> reduction_of(functional.cross_entropy).weigh(
        ...     (None, torch.tensor([0, -100]))
        ... )
        1.0
    """

    weight_fn: WeightFunction
    sums: bool = False
    is_known: bool = False

    def weigh(self, batch: Any) -> float:
        """Return the weight of a batch in the mean; 0 if it has no samples."""
        return self.weight_fn(batch) if has_samples(batch) else 0.0

    def shares(
        self, weights: Sequence[float], total: float | None, processes: int
    ) -> list[float]:
        """Return the factor of each part's loss.

        `total` is the mean weight over the processes, None if there is one. Results are
        divided by the number of processes afterwards.
        """
        if self.sums:
            return [float(processes)] * len(weights)
        own = sum(weights) if total is None else total
        return [weight / (own or 1.0) for weight in weights]

    def combine(self, losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Return the total loss of this process's parts."""
        if len(losses) == 1:
            return losses[0]
        if self.sums:
            return torch.stack(list(losses)).sum()
        total = sum(weights)
        # The mean over no samples is NaN, and is left out.
        parts = [
            loss * (weight / total)
            for loss, weight in zip(losses, weights, strict=True)
            if weight
        ]
        return torch.stack(parts or list(losses)).sum()


def reduction_of(
    loss_fn: LossFunction | None, weight_fn: WeightFunction | None = None
) -> Reduction:
    """Return the reduction of a loss function, as far as it can be inferred.

    `reduction="sum"` is recognised on torch's losses, and in a `functools.partial`. The
    means of cross entropy and negative log likelihood ignore a class and may weight
    the others. Other functions of integers, and models that return their loss, are
    assumed to ignore targets or labels of -100, the convention; anything else is
    assumed to be a mean over samples.

    Raises:
        UsageError: `weight_fn` was given for a loss that sums.

    Examples:
        >>> reduction_of(nn.MSELoss(reduction="sum")).sums
        True
    """
    options = _options(loss_fn)
    if options.get("reduction") == "sum":
        if weight_fn is not None:
            raise UsageError(
                "expected weight_fn with a loss that is a mean, but this loss function "
                "sums; leave weight_fn out, or use a mean."
            )
        return Reduction(_count_samples, sums=True, is_known=True)
    if weight_fn is not None:
        return Reduction(weight_fn)
    if loss_fn is None:
        return Reduction(_count_labels)
    if _is_over_classes(loss_fn) and options.get("reduction", "mean") == "mean":
        weigh = functools.partial(
            _count_classes, options.get("ignore_index", _IGNORED), options.get("weight")
        )
        return Reduction(weigh, is_known=True)
    return Reduction(_count_targets)


def _options(loss_fn: Any) -> Mapping[str, Any]:
    """Return the options of one of torch's loss functions."""
    if isinstance(loss_fn, functools.partial):
        return loss_fn.keywords
    if not isinstance(loss_fn, nn.Module):
        return {}
    names = "reduction", "ignore_index", "weight"
    return {name: getattr(loss_fn, name) for name in names if hasattr(loss_fn, name)}


def _is_over_classes(loss_fn: Any) -> bool:
    function = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    return function in (functional.cross_entropy, functional.nll_loss) or type(
        function
    ) in (nn.CrossEntropyLoss, nn.NLLLoss)


def _count_samples(batch: Any) -> float:
    return float(batch_size(batch))


def _count_labels(batch: Any) -> float:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return _count_kept(labels, batch)


def _count_targets(batch: Any) -> float:
    return _count_kept(_targets(batch), batch)


def _count_kept(targets: Any, batch: Any) -> float:
    if not isinstance(targets, Tensor) or targets.dtype not in _WHOLE:
        return _count_samples(batch)
    return float((targets != _IGNORED).sum())


def _targets(batch: Any) -> Any:
    return batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None


def _count_classes(ignored: int, weight: Tensor | None, batch: Any) -> float:
    """Return the denominator of the mean over a batch; reads targets on a device."""
    targets = _targets(batch)
    if not isinstance(targets, Tensor):
        return _count_samples(batch)
    if targets.is_floating_point():
        # A probability for each class, which is the second dimension.
        return targets.numel() / (targets.shape[1] if targets.dim() > 1 else 1)
    counted = targets[targets != ignored]
    if weight is None:
        return float(counted.numel())
    return float(weight.detach().to(counted.device, torch.float64)[counted].sum())


_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 0.02
"""For losses of 16 bits: some units in the last of 8."""


class Proof:
    """A loss function that is checked on the halves of its first batch.

    A batch may be computed in parts only if its loss is the mean of theirs: a loss that
    compares samples with each other, or averages over something else, would get other
    gradients. Two calls without a graph, on outputs that the model has already
    returned, show this once; the host waits for the device.

    Args:
        loss_fn: The loss function.
        reduction: Its assumed reduction.
        device: The device whose generators it may draw from; then nothing is known.

    Attributes:
        is_over: Whether the check is done.
        finding: A description, if the loss is not such a mean.

    Examples:
        >>> from recoup.train.data.reduction import reduction_of
        >>> def largest(outputs, targets):
        ...     return (outputs - targets).max()
        >>> proof = Proof(largest, reduction_of(largest), torch.device("cpu"))
        >>> _ = proof.loss((None, torch.zeros(4)), torch.arange(4.0), torch.zeros(4))
        >>> proof.finding
        'its loss is 3, and the mean of the losses of its halves is 2'
    """

    def __init__(
        self, loss_fn: LossFunction, reduction: Reduction, device: torch.device
    ) -> None:
        self._loss_fn = loss_fn
        self._reduction = reduction
        self._device = device
        self.is_over = reduction.is_known
        self.finding: str | None = None

    def loss(self, batch: Any, outputs: Any, targets: Any) -> Tensor:
        """Return the loss of a batch, and check the function on its halves."""
        loss = self._loss_fn(outputs, targets)
        count = sample_count(batch)
        if count is None or count < 2 or sample_count(outputs) != count:
            return loss
        states = random_states(self._device, with_numpy=False)
        with torch.no_grad():
            halves = split_batch((outputs, batch), 2)
            losses = [self._loss_fn(out, part[1]) for out, part in halves]
        if not same_random_states(states, self._device):
            restore_random_states(states, self._device)
            self.is_over = True
            return loss
        weights = [self._reduction.weigh(part) for _, part in halves]
        self._compare(loss.detach(), losses, weights)
        return loss

    def _compare(
        self, loss: Tensor, losses: list[Tensor], weights: list[float]
    ) -> None:
        whole, *parts = (float(each) for each in (loss, *losses))
        mean = float(self._reduction.combine(losses, weights))
        if not all(math.isfinite(number) for number in (whole, mean)):
            return
        self.is_over = True
        size = max(map(abs, (whole, *filter(math.isfinite, parts))))
        if abs(whole - mean) > _TOLERANCES.get(loss.dtype, _COARSE) * size:
            self.finding = (
                f"its loss is {whole:g}, and the mean of the losses of its halves is "
                f"{mean:g}"
            )

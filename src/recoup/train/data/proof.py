"""Proof: whether the losses of parts make the loss of the whole, tried out once."""

import math
from typing import Any

import torch
from torch import Tensor

from recoup.backend.state.global_generators import (
    random_states,
    restore_random_states,
    same_random_states,
)
from recoup.train.data.batches import LossFunction, sample_count, split_batch
from recoup.train.data.reduction import Reduction

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 0.02
"""For losses of 16 bits: some units in the last of 8."""


class Proof:
    """A loss function that is tried out on the halves of the first batch it gets.

    A batch may be computed in parts only if its loss is the mean of theirs: a loss that
    compares samples with each other, or averages over something else, has other
    gradients then. Two calls without a graph on what the model has returned already
    tell, once; nothing else is computed, and the device is waited for.

    Args:
        loss_fn: The loss function.
        reduction: How it is thought to reduce.
        device: Whose generators it may draw from; then nothing can be told.

    Attributes:
        is_over: Nothing is left to be tried out.
        finding: What was found in words, if the loss is no such mean.

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
        """Return the loss of a batch, and try the function out on its halves."""
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

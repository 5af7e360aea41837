"""When a step does not fit: recompute more, then compute the batch in pieces."""

import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn

from recoup.train.data.batches import sample_count, split_batch

_log = logging.getLogger(__name__)
_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


class Recovery:
    """Knows what has been given up so far to make steps fit.

    Args:
        model: The model; with batch normalisation in training its batches are never
            split, because statistics of a piece are not those of the batch.
        tighten: Make the model need less memory at the price of time; returns in
            words what was done, or nothing if nothing is left to do.
    """

    def __init__(self, model: nn.Module, tighten: Callable[[], str | None]) -> None:
        self._model = model
        self._tighten = tighten
        self.pieces = 1
        self._reason: str | None = None

    def cut(self, batches: Sequence[Any]) -> list[Any]:
        """Return the batches in as many pieces as have turned out to fit.

        Those that have no samples to split by stay whole.
        """
        if self.pieces == 1:
            return list(batches)
        parts: list[Any] = []
        for batch in batches:
            pieces = min(self.pieces, sample_count(batch) or 1)
            parts += [batch] if pieces == 1 else split_batch(batch, pieces)
        return parts

    def relieve(self, batches: Sequence[Any]) -> str | None:
        """Give up a little more; return what in words, or nothing if all is given up.

        Costs nothing but what is given up: nothing is computed here.
        """
        done = self._tighten()
        if done is None and self._may_split(batches):
            self.pieces = min(2 * self.pieces, _largest(batches))
            done = f"batches are computed in {self.pieces} pieces"
        if done is not None:
            _log.warning("A step ran out of memory. From now on %s", done)
        return done

    def refuse_to_split(self, finding: str) -> None:
        """Compute batches whole from now on, because their parts are something else.

        Args:
            finding: What was found of a batch, in words.

        Raises:
            torch.OutOfMemoryError: They are in pieces, because whole they do not fit.
        """
        pieces, self.pieces = self.pieces, 1
        self._reason = (
            "the batch is not split because its loss is no mean over its samples: "
            f"{finding}. Let it average; or pass weight_fn=, what a batch weighs in "
            "the mean"
        )
        if pieces > 1:
            raise torch.OutOfMemoryError(
                "a step ran out of memory, and its batch cannot be computed in pieces"
            )
        _log.warning(
            "A step of several batches has other gradients than one of all their "
            "samples: of a batch %s. Let the loss average; or pass weight_fn=, what a "
            "batch weighs in the mean",
            finding,
        )

    def why_not(self, batches: Sequence[Any]) -> str:
        """Say why nothing is left to give up."""
        if _has_batch_statistics(self._model):
            return (
                "the batch is not split because the model has batch normalisation, "
                "whose statistics would change"
            )
        if self._reason is not None:
            return self._reason
        sizes = [sample_count(batch) for batch in batches]
        if None in sizes:
            return "the batch cannot be split: its tensors have different lengths"
        return f"the batch is in {self.pieces} pieces and cannot be split further"

    def _may_split(self, batches: Sequence[Any]) -> bool:
        sizes = [sample_count(batch) for batch in batches]
        return (
            self._reason is None
            and None not in sizes
            and _largest(batches) > self.pieces
            and not _has_batch_statistics(self._model)
        )


def _largest(batches: Sequence[Any]) -> int:
    return max(sample_count(batch) or 0 for batch in batches)


def _has_batch_statistics(model: nn.Module) -> bool:
    return any(isinstance(m, _BATCH_NORMS) and m.training for m in model.modules())


def weakly(method: Callable[[], str | None]) -> Callable[[], str | None]:
    """Return a method that does not keep its object alive, which may keep this one."""
    weak = WeakMethod(method)

    def call() -> str | None:
        alive = weak()
        return None if alive is None else alive()

    return call

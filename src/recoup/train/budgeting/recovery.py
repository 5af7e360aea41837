"""Recovery from out of memory: recompute more, then split the batch."""

import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn

from recoup.backend.memory.meters import is_out_of_memory
from recoup.backend.state.snapshots import StepSnapshot
from recoup.errors import UnsupportedError
from recoup.fitting.compiled_fit import CompiledFit
from recoup.fitting.fit import Fit
from recoup.train.budgeting.block_regions import BlockRegions
from recoup.train.data.batches import sample_count, split_batch
from recoup.train.processes import Processes, unwrapped

_log = logging.getLogger(__name__)
_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


class Recovery:
    """Tracks the measures taken so far to make steps fit.

    Args:
        model: The model; with batch normalisation in training its batches are never
            split, because statistics of a piece are not those of the batch.
        tighten: Makes the model need less memory at the price of time; returns the
            measure in words, or None if there is none left.
    """

    def __init__(self, model: nn.Module, tighten: Callable[[], str | None]) -> None:
        self._model = model
        self._tighten = tighten
        self.pieces = 1
        self._reason: str | None = None

    def cut(self, batches: Sequence[Any]) -> list[Any]:
        """Return the batches in the number of pieces that fits.

        Batches without samples to split along stay whole.
        """
        if self.pieces == 1:
            return list(batches)
        parts: list[Any] = []
        for batch in batches:
            pieces = min(self.pieces, sample_count(batch) or 1)
            parts += [batch] if pieces == 1 else split_batch(batch, pieces)
        return parts

    def relieve(self, batches: Sequence[Any]) -> str | None:
        """Take the next measure; return it in words, or None if none is left.

        Computes nothing itself.
        """
        done = self._tighten()
        if done is None and self._may_split(batches):
            self.pieces = min(2 * self.pieces, _largest(batches))
            done = f"batches are computed in {self.pieces} pieces"
        if done is not None:
            _log.warning("A step ran out of memory. From now on %s", done)
        return done

    def refuse_to_split(self, finding: str) -> None:
        """Compute batches whole from now on: their loss is not a mean of parts.

        Raises:
            torch.OutOfMemoryError: They are split, because whole they do not fit.
        """
        pieces, self.pieces = self.pieces, 1
        self._reason = (
            "the batch is not split because its loss is not a mean over its samples: "
            f"{finding}. Use a mean; or pass weight_fn=, the weight of a batch in the "
            "mean"
        )
        if pieces > 1:
            raise torch.OutOfMemoryError(
                "a step ran out of memory, and its batch cannot be computed in pieces"
            )
        _log.warning(
            "A step of several batches has other gradients than one of all their "
            "samples: of a batch %s. Use a mean as loss; or pass weight_fn=, the "
            "weight of a batch in the mean",
            finding,
        )

    def why_not(self, batches: Sequence[Any]) -> str:
        """Return why no measure is left."""
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
    """Return a function that calls a method without keeping its object alive."""
    weak = WeakMethod(method)

    def call() -> str | None:
        alive = weak()
        return None if alive is None else alive()

    return call


_CHANGED = (
    "recoup did not retry the step: it had added to gradients from before. Drop them "
    "(zero_grad(set_to_none=True)) before the step."
)


class StepRecovery:
    """Retries steps of a training loop with less memory when memory runs out.

    First more is recomputed: a plan for a tenth less memory, or without a plan every
    block. Then the batch is computed in 2, 4, 8 pieces; with compiled blocks it is
    split directly. Measures stay in effect for later steps.

    Args:
        model: The model. With batch normalisation in training its batches are not
            split: the statistics of a piece are not those of the batch.
        report: The report of `recoup.fit`, if the model has a plan.

    Raises:
        UnsupportedError: Several processes train the model: one cannot retry alone.

    Examples:
        >>> model = nn.Linear(4, 1)
        >>> recovery = StepRecovery(model)
        >>> def compute(part, share):
        ...     (model(part).mean() * share).backward()
        >>> recovery.run(compute, torch.ones(8, 4))
        1
    """

    def __init__(
        self, model: nn.Module, report: Fit | CompiledFit | None = None
    ) -> None:
        if Processes(model).count > 1:
            raise UnsupportedError(
                "expected a model that one process trains, got one of several; use "
                "recoup.Trainer, whose processes retry together."
            )
        self._model = model
        self._report = report
        self._regions = BlockRegions(unwrapped(model))
        self._recovery = Recovery(model, weakly(self._tighten))

    @property
    def pieces(self) -> int:
        """The number of pieces in which batches are computed now."""
        return self._recovery.pieces

    def run(self, compute: Callable[[Any, float], object], batch: Any) -> int:
        """Run forward and backward of a batch, in pieces if it does not fit whole.

        Before a retry, gradients, buffers and random generators of the model and of
        all other objects that `compute` refers to are restored.

        Args:
            compute: Runs forward and backward of a part of the batch, with a loss that
                is its mean over samples times the given share.
            batch: The batch; tensors in any structure, samples along their first axis.

        Returns:
            The number of pieces.

        Raises:
            torch.OutOfMemoryError: It does not fit even with all measures.
        """
        device = next(iter(self._model.parameters())).device
        before = StepSnapshot(compute, self._model, devices=[device])
        while True:
            parts = self._recovery.cut([batch])
            try:
                for part in parts:
                    compute(part, _share(part, batch) if len(parts) > 1 else 1.0)
                return len(parts)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if not before.restore():
                    error.add_note(_CHANGED)
                    raise
                if self._recovery.relieve([batch]) is None:
                    error.add_note(f"recoup: {self._recovery.why_not([batch])}.")
                    raise
            # The exception, and the values that its frames kept alive, are gone here.
            if device.type != "cpu":
                torch.accelerator.empty_cache()

    def release(self) -> None:
        """Remove the regions that recovery put on blocks; a plan stays."""
        self._regions.take_off()

    def _tighten(self) -> str | None:
        if isinstance(self._report, Fit):
            if self._report.tighten():
                return "the plan is for a tenth less memory"
        elif self._report is None and self._regions.recompute_every_block():
            return "every block is recomputed in backward on its own"
        return None


def _share(part: Any, batch: Any) -> float:
    return (sample_count(part) or 0) / max(sample_count(batch) or 0, 1)

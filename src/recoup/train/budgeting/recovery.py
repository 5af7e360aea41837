"""When a step does not fit: recompute more, then compute the batch in pieces."""

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


_CHANGED = (
    "recoup did not run the step again: it had added to gradients that were there "
    "before it. Drop them (zero_grad(set_to_none=True)) before the step."
)


class StepRecovery:
    """Runs steps of a training loop again, with less memory, when memory runs out.

    First more is recomputed: a tenth less memory is planned for, or without a plan
    every block is recomputed. Then the batch is computed in 2, 4, 8 pieces, with
    compiled blocks at once. What has turned out to be needed stays so for later steps.

    Args:
        model: The model. One with batch normalisation in training is not computed in
            pieces: the statistics of a piece are not those of the batch.
        report: The report of `recoup.fit`, if the model has a plan.

    Raises:
        UnsupportedError: Several processes train the model: one cannot go back alone.

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
                "recoup.Trainer, whose processes go back together."
            )
        self._model = model
        self._report = report
        self._regions = BlockRegions(unwrapped(model))
        self._recovery = Recovery(model, weakly(self._tighten))

    @property
    def pieces(self) -> int:
        """In how many pieces batches are computed by now."""
        return self._recovery.pieces

    def run(self, compute: Callable[[Any, float], object], batch: Any) -> int:
        """Run forward and backward of a batch, in pieces if it does not fit whole.

        Before a step runs again, gradients, buffers and random generators are restored,
        those of the model and of what else `compute` refers to.

        Args:
            compute: Runs forward and backward of a part of the batch, with a loss that
                is its mean over samples times the share it is given.
            batch: The batch; tensors in any structure, samples along their first axis.

        Returns:
            In how many pieces it was computed.

        Raises:
            torch.OutOfMemoryError: It does not fit, however it is computed.
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
            # Here the exception is gone, and with it what its frames kept alive.
            if device.type != "cpu":
                torch.accelerator.empty_cache()

    def release(self) -> None:
        """Take off the blocks what was put on them; a plan stays."""
        self._regions.take_off()

    def _tighten(self) -> str | None:
        if isinstance(self._report, Fit):
            if self._report.tighten():
                return "a tenth less memory is planned for"
        elif self._report is None and self._regions.recompute_every_block():
            return "every block is recomputed in backward by itself"
        return None


def _share(part: Any, batch: Any) -> float:
    return (sample_count(part) or 0) / max(sample_count(batch) or 0, 1)

"""Recovery from out-of-memory errors in any training loop."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from recoup.backend.memory.meters import is_out_of_memory
from recoup.backend.state.snapshots import StepSnapshot
from recoup.errors import UnsupportedError
from recoup.fitting.fit import Fit
from recoup.train.budgeting.recovery import Recovery, weakly
from recoup.train.budgeting.trainer_regions import BlockRegions
from recoup.train.data.batches import sample_count
from recoup.train.processes import Processes, unwrapped

_CHANGED = (
    "recoup did not run the step again: it had added to gradients that were there "
    "before it. Drop them (zero_grad(set_to_none=True)) before the step."
)


class StepRecovery:
    """Runs steps of a training loop again, with less memory, when memory runs out.

    First more is recomputed: a tenth less memory is planned for, or without a plan
    every block is recomputed. Then the batch is computed in 2, 4, 8 pieces. What has
    turned out to be needed stays so for later steps.

    Args:
        model: The model. One with batch normalisation in training is not computed in
            pieces: the statistics of a piece are not those of the batch.
        report: What `recoup.fit` returned, if the model has a plan.

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

    def __init__(self, model: nn.Module, report: Fit | None = None) -> None:
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
        if self._report is not None:
            if self._report.tighten():
                return "a tenth less memory is planned for"
        elif self._regions.recompute_every_block():
            return "every block is recomputed in backward by itself"
        return None


def _share(part: Any, batch: Any) -> float:
    return (sample_count(part) or 0) / max(sample_count(batch) or 0, 1)

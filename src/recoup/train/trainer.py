"""The trainer: a loop with correct steps, recovery, exact resume and results."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recoup.errors import SnapshotError, SnapshotWriteError, UsageError
from recoup.fitting.compiled_fit import CompiledFit
from recoup.fitting.fit import Fit
from recoup.precision.scaler import GradientScaler
from recoup.train.budgeting.block_regions import BlockRegions
from recoup.train.budgeting.process_budget import UnitPlan, fit_together
from recoup.train.budgeting.recovery import weakly
from recoup.train.compatibility import (
    as_schedulers,
    check_parts,
    check_types,
    enter_training_mode,
    joined_schedulers,
)
from recoup.train.data.batches import LossFunction
from recoup.train.data.position import Position, make_loader
from recoup.train.data.reduction import WeightFunction
from recoup.train.fit_call import FitCall, Interruption, ProgressBar, groups, step_count
from recoup.train.processes import Report, unwrapped
from recoup.train.run_results import RunResult, StepOutcome, StepResult
from recoup.train.saving.averaging import ParameterAverage, refuse_applied
from recoup.train.saving.run_state import RunState
from recoup.train.saving.snapshot import check_folder, keep_last, read_snapshot
from recoup.train.settings import TrainerSettings, check_count
from recoup.train.stepper import Stepper

_log = logging.getLogger(__name__)
_VERSION = 3
_READABLE = (2, _VERSION)
"""Version 2 has only the data position of the first process."""
_NEEDED = frozenset(
    {"processes", "steps", "skipped", "pieces", "position", "recomputes"}
    | {"kinds", "model", "optimizer", "random", "scheduler", "scaler", "average"}
)
"""The keys that every snapshot of a run has."""


class Trainer:
    """Trains a model; the loop is in `fit`, one step of it in `step`.

    A step that overflows is undone: parameters, optimizer, schedule, average, buffers
    and random states stay as before it. A step that does not fit in memory is retried
    with blocks recomputed, then with the batch in pieces. A run that is interrupted or
    killed resumes from its last snapshot, with bitwise the same result on the CPU.

    A model of which no part is in training mode, as `from_pretrained` returns it, is
    put in training mode, and that is logged. One with some parts in evaluation mode
    is not changed.

    The model may be wrapped in `DistributedDataParallel` or sharded with
    `fully_shard`; start such programs with `torchrun`.

    Args:
        model: The model, on the device of the training.
        optimizer: Made from the model's parameters; or several, which step together.
        settings: By default `TrainerSettings()`.
        loss_fn: Called as `loss_fn(outputs, targets)` on batches that are pairs; by
            default the model is called with the batch and returns its loss.
        scheduler: Advanced after each step that was not skipped, or each epoch; or
            several, each of one of the optimizers.
        weight_fn: The weight of a batch among those of a step. By default the
            denominator of torch's cross entropy; with other functions and models that
            return their loss, the number of integer targets or labels other than -100;
            else the number of samples.

    Raises:
        UsageError: The parts do not fit together.

    Examples:
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = Trainer(model, optimizer, loss_fn=nn.functional.mse_loss)
        >>> data = [(torch.ones(8, 4), torch.ones(8, 1))] * 10
        >>> result = trainer.fit(data, epochs=2)
        >>> result.steps, result.skipped, result.last.loss < 1e-6
        (20, 0, True)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        settings: TrainerSettings | None = None,
        loss_fn: LossFunction | None = None,
        *,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        weight_fn: WeightFunction | None = None,
    ) -> None:
        self.settings = settings or TrainerSettings()
        schedulers = as_schedulers(scheduler)
        optimizer = check_parts(model, optimizer, schedulers)
        self.model = model
        self.optimizer = optimizer
        self.scheduler = joined_schedulers(schedulers)
        self._fitted: Fit | CompiledFit | UnitPlan | None = None
        self._stepper = Stepper(
            model,
            optimizer,
            self.settings,
            loss_fn=loss_fn,
            weight_fn=weight_fn,
            tighten=weakly(self._tighten),
        )
        compiles = self.settings.compile and self._stepper.device.type == "cpu"
        if compiles and self.settings.measure_memory:
            raise UsageError(
                f"expected measure_memory=None with compile={self.settings.compile!r} "
                "on a CPU, got True: compiled blocks show no operators to count."
            )
        check_types(model, self._stepper.scaler)
        self._position = Position(self._stepper.device)
        decay = self.settings.average_decay
        inner = unwrapped(model)
        self.average = None if decay is None else ParameterAverage(inner, decay=decay)
        self._steps = 0
        self._known_skips = 0
        self._unknown: StepOutcome | None = None
        self._run: FitCall | None = None
        self._regions = BlockRegions(inner)
        if self.settings.use_gradient_checkpointing:
            self._regions.put_on(self.settings.checkpoint_segment_size)
        if self._stepper.precision.dtype is not torch.float32:
            _log.info(
                "Mixed Precision Training enabled: %s", self._stepper.precision.dtype
            )
        self._stepper.processes.connect()

    @property
    def scaler(self) -> GradientScaler | None:
        """The gradient scaler; only float16 has one."""
        return self._stepper.scaler

    @property
    def fitted(self) -> Fit | CompiledFit | UnitPlan | None:
        """The report of `recoup.fit`; None before the first step, or without budget."""
        return self._fitted

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._stepper.device

    @property
    def steps(self) -> int:
        """The number of steps, including skipped ones and those before a resume."""
        return self._steps

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped because of nonfinite gradients.

        Waits for the last step of a fused optimizer in float16.
        """
        self._settle()
        return self._known_skips

    @property
    def epoch(self) -> int:
        """The number of finished epochs."""
        return self._position.epoch

    def step(self, *batches: Any) -> StepResult:
        """Make one step of one batch, or of several with accumulated gradients.

        Batches are weighted by `weight_fn`, so that the gradients equal those of one
        batch with all their samples; batches without samples are left out. With several
        processes all must call it together.

        Returns:
            The result of the step.

        Raises:
            UsageError: No batch was given, or none that has samples; or the averages
                are applied.
            torch.OutOfMemoryError: The step does not fit even with all measures.
        """
        if not batches:
            raise UsageError("expected at least one batch, got none.")
        reports = self._stepper.processes.exchange(self._stepper.report(batches))
        return self._step(batches, reports)

    def fit(
        self,
        data: Iterable[Any],
        epochs: int | None = None,
        *,
        resume: bool = False,
        on_step: Callable[[StepResult], object] | None = None,
    ) -> RunResult:
        """Train for a number of epochs.

        Ctrl-C, SIGTERM or `stop` ends it after the current step, with a snapshot if
        there is a path for one; calling `fit` again continues from there, in this
        process or with `resume=True` in another. If a snapshot cannot be written, that
        is logged and training continues.

        Args:
            data: A loader, a list of batches, or a dataset.
            epochs: The number of epochs; by default that of the settings. A call that
                continues an interrupted one counts the epochs that one has finished.
                With `resume`, the number of epochs of the whole training, including
                those in the snapshot, over any number of calls.
            resume: Load the snapshot first, if there is one.
            on_step: Called after each step with its result. It may call `stop`.

        Returns:
            The result of the run.

        Raises:
            UsageError: The data cannot be iterated or is empty, the folder for the
                snapshots does not exist, or the averages are applied.
            SnapshotError: The snapshot does not fit this trainer.
            SnapshotWriteError: The last snapshot could not be written. Training has
                ended and the model has its parameters: `save` elsewhere.
        """
        start = time.perf_counter()
        epochs = self.settings.epochs if epochs is None else epochs
        check_count("epochs", epochs)
        refuse_applied(self.average, "fit")
        loader = make_loader(data, self.settings.batch_size)
        check_folder(self.settings.snapshot_path)
        resumed = resume and self._resume()
        steps, skipped = self._steps, self.skipped_steps
        run = FitCall(on_step)
        position = self._position
        end = epochs if resumed else position.first_epoch + epochs
        is_first = self._stepper.processes.is_first
        bar = ProgressBar(enabled=self.settings.show_progress and is_first)
        self._run = run
        try:
            with Interruption() as run.interruption, bar as run.bar:
                while position.epoch < end and self._run_epoch(loader, run):
                    pass
        finally:
            self._run = None
        self._stepper.peaks.settle()
        interrupted = position.epoch < end
        if run.is_unwritten or interrupted:
            self._write()
        if position.epoch == end:
            # After the snapshot, so that a resumed finished run is finished.
            position.first_epoch = position.epoch
        return RunResult(
            epochs=position.epoch,
            steps=self._steps - steps,
            skipped=self.skipped_steps - skipped,
            seconds=time.perf_counter() - start,
            interrupted=interrupted,
            last=run.last,
        )

    def stop(self) -> None:
        """End `fit` after the current step; call it in `on_step`.

        With several processes one call suffices: all end after the next step.

        Raises:
            UsageError: `fit` is not running.
        """
        if self._run is None:
            raise UsageError(
                "expected fit to be running, got a call of stop outside it; call stop "
                "in on_step."
            )
        self._run.is_stopped = True

    def save(self, path: str | Path) -> None:
        """Write everything needed to resume from here to a file, atomically.

        While averages are applied, the parameters themselves are written. With several
        processes all must call it together; the first one writes.

        Raises:
            SnapshotError: The state of the scheduler or optimizer is not plain data.
            SnapshotWriteError: The file cannot be written.
            PeerError: Another process is gone.
            UsageError: The folder does not exist.
        """
        check_folder(path)
        self._save(path)

    def _save(self, path: str | Path) -> None:
        self._stepper.peaks.settle()
        own = {
            "version": _VERSION,
            "steps": self._steps,
            "skipped": self.skipped_steps,
            "pieces": self._stepper.recovery.pieces,
            **self._regions.state_dict(),
        }
        with nullcontext() if self.average is None else self.average.lifted():
            self._state().save(path, own)

    def load(self, path: str | Path) -> None:
        """Restore the run that wrote the file. Nothing in it is executed.

        Raises:
            SnapshotError: The file is damaged, or from another model or trainer.
            UsageError: The averages are applied.
        """
        refuse_applied(self.average, "load")
        state = read_snapshot(path)
        if not isinstance(state, dict) or state.get("version") not in _READABLE:
            raise SnapshotError(
                f"expected a file of this version's trainer, got {path}."
            )
        self._state().load(path, state, _NEEDED)
        self._steps, self._known_skips = state["steps"], state["skipped"]
        self._unknown = None
        self._stepper.recovery.pieces = state["pieces"]
        self._regions.load_state_dict(state)

    def release(self) -> None:
        """Remove regions around blocks, or the plan, from the model."""
        self._regions.take_off()
        if self._fitted is not None:
            self._fitted.remove()
            self._fitted = None

    def _step(self, batches: Sequence[Any], reports: Sequence[Report]) -> StepResult:
        if self.average is not None:
            refuse_applied(self.average, "step")
        if not self.model.training:
            enter_training_mode(self.model)
        if len(batches) > 1 or reports[0].is_empty:
            batches = self._stepper.with_samples(batches, reports)
        self._prepare(batches)
        result = self._stepper.step(batches, reports, number=self._steps + 1)
        self._steps += 1
        # The previous step: its result has arrived, or the device lags by a step.
        self._settle()
        self._unknown = result.outcome
        if self.average is not None and result.stepped:
            self.average.update()
        scheduler = self.scheduler if self.settings.schedule_each == "step" else None
        if scheduler is not None and result.stepped:
            scheduler.step()
        return result

    def _settle(self) -> None:
        """Count the last step as skipped, if it was."""
        outcome, self._unknown = self._unknown, None
        if outcome is not None and outcome.skipped:
            self._known_skips += 1
            if self.scaler is not None:
                _ = self.scaler.skipped_updates  # which logs it

    def _run_epoch(self, loader: Iterable[Any], run: FitCall) -> bool:
        """Run one epoch; return False if stopped before its end."""
        position, processes = self._position, self._stepper.processes
        size = self.settings.accumulation_steps
        run.bar.begin_epoch(
            position.epoch + 1,
            steps=step_count(loader, size),
            done=position.batches // size,
        )
        for group in groups(position.open(loader), size):
            report = self._stepper.report(group, stop=run.is_ending)
            reports = processes.exchange(report)
            if len({each.batches for each in reports}) > 1 or not report.batches:
                break
            run.last = None  # without a reference, its peak is not read
            result = self._step(group, reports)
            # First: the callback may save, or raise and continue later.
            position.advance(group)
            run.take(result)
            every = self.settings.snapshot_every_steps
            if every and self._steps % every == 0:
                self._write_between(run)
            if any(each.stop for each in reports) or (
                processes.count == 1 and run.is_ending
            ):
                return False
        position.close()
        if self.scheduler is not None and self.settings.schedule_each == "epoch":
            self.scheduler.step()
        if self.settings.snapshot_every_steps is None:
            self._write_between(run)
        return True

    def _prepare(self, batches: Sequence[Any]) -> None:
        """Plan for the budget, once there is a batch to plan with."""
        if self.settings.budget is None or self._fitted is not None:
            return
        self._fitted = fit_together(
            unwrapped(self.model),
            lambda: self._stepper.rehearse(batches),
            self.settings.budget,
            optimizer=self.optimizer,
            processes=self._stepper.processes,
            compile=self.settings.compile,
        )
        _log.info("%s", self._fitted)

    def _tighten(self) -> str | None:
        if isinstance(self._fitted, CompiledFit):
            return None  # the batch is split
        if self._fitted is not None and self._fitted.tighten():
            return "the plan is for a tenth less memory"
        if self.settings.budget is None and self._regions.recompute_every_block():
            return "every block is recomputed in backward on its own"
        return None

    def _state(self) -> RunState:
        parts = {
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "average": self.average,
        }
        return RunState(
            self.model, self.optimizer, parts, self._position, self._stepper.processes
        )

    def _resume(self) -> bool:
        """Load the snapshot, and return whether there was one."""
        path = self.settings.snapshot_path
        if path is None:
            raise UsageError("expected snapshot_path in the settings with resume=True.")
        if not Path(path).exists():
            return False
        self.load(path)
        return True

    def _write(self) -> None:
        """Write a snapshot, if there is a path for one, and keep the last ones."""
        path, keep = self.settings.snapshot_path, self.settings.snapshot_keep
        if path is None:
            return
        self._save(path)
        if keep is not None and self._stepper.processes.is_first:
            keep_last(path, self._steps, keep)

    def _write_between(self, run: FitCall) -> None:
        """Write a snapshot; a failure is logged, since a later one may succeed."""
        try:
            self._write()
        except SnapshotWriteError as error:
            _log.error("%s Training continues without this snapshot.", error)
        else:
            run.is_unwritten = False

"""One training step: forward, backward, update; a skipped step restores its state."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recoup.backend.memory.meters import is_out_of_memory
from recoup.backend.state.snapshots import StateSnapshot
from recoup.backend.training.optimizer_steps import parameters_of
from recoup.core.callers import calls_user
from recoup.errors import PeerError, UnsupportedError, UsageError
from recoup.measurement.steps.optimizers import state_tensors
from recoup.precision.mixed_precision import MixedPrecisionScope
from recoup.precision.scaler import GradientScaler
from recoup.train.budgeting.recovery import Recovery
from recoup.train.data.batches import (
    LossFunction,
    compute_loss,
    has_samples,
    tensors_in,
    to_device,
)
from recoup.train.data.reduction import Proof, WeightFunction, reduction_of
from recoup.train.processes import Processes, Report
from recoup.train.run_results import Peaks, StepOutcome, StepResult
from recoup.train.saving.run_state import whole
from recoup.train.settings import TrainerSettings

OUT_OF_MEMORY, FAILED = 1, 2

_CANNOT_GO_BACK = (
    "With a model that is sharded, has a static graph, or batch statistics over "
    "processes, a process that runs out of memory cannot go back: the others wait for "
    "it inside forward or backward. Set budget=, or a smaller batch, instead."
)


class Stepper:
    """Computes gradients and updates parameters, independent of data and files.

    The order is: scale the loss, backward, unscale, clip, step if all gradients are
    finite, update the scale. Schedule and average then depend on `StepResult.stepped`.

    Attributes:
        learns_late: Whether the host may learn later that a device skipped a step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        settings: TrainerSettings,
        *,
        loss_fn: LossFunction | None,
        weight_fn: WeightFunction | None,
        tighten: Callable[[], str | None],
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._settings = settings
        self._loss_fn = loss_fn
        self._reduction = reduction_of(loss_fn, weight_fn)
        self.device = next(iter(model.parameters())).device
        self.processes = Processes(model)
        self.learns_late = self.processes.count == 1 and self.device.type != "cpu"
        self.precision = MixedPrecisionScope(
            settings.mixed_precision, device=self.device
        )
        self.scaler: GradientScaler | None = None
        if self.precision.needs_scaler:
            self.scaler = GradientScaler(
                self.device.type,
                settings.initial_loss_scale,
                growth_interval=settings.loss_scale_growth_interval,
                dynamic=settings.dynamic_loss_scale,
            )
        self.recovery = Recovery(model, tighten)
        self._proof: Proof | None = None
        if loss_fn is not None:
            self._proof = Proof(loss_fn, self._reduction, self.device)
        self._before = StateSnapshot(model, devices=[self.device], with_numpy=False)
        self.peaks = Peaks(
            self.device,
            wanted=settings.measure_memory,
            existing=lambda: (model, *state_tensors(optimizer)),
        )
        self._may_recover = self._decide_recovery()
        self._may_undo = (
            self._may_recover or self.scaler is not None or settings.skip_nonfinite
        )
        self._known_shapes: set[Any] = set()
        self._is_broken = False

    @property
    def _parameters(self) -> list[Tensor]:
        """The optimizer's parameters now: groups may be added during a run."""
        return parameters_of(self._optimizer)

    def report(self, batches: Sequence[Any], *, stop: bool = False) -> Report:
        """Return the report on the next step for the other processes."""
        several = self.processes.count > 1
        if len(batches) == 1 and not several:
            # Alone it has the full weight.
            is_empty = not has_samples(batches[0])
            return Report(batches=1, stop=stop, is_empty=is_empty)
        return Report(
            weight=sum(self._reduction.weigh(batch) for batch in batches),
            batches=len(batches),
            stop=stop,
            is_new=several and not _shapes(batches) <= self._known_shapes,
            is_empty=not any(map(has_samples, batches)),
        )

    def with_samples(
        self, batches: Sequence[Any], reports: Sequence[Report]
    ) -> Sequence[Any]:
        """Return the batches of a step: a mean leaves out the empty ones.

        With several processes they are computed anyway, with no weight: the other
        processes wait for each one's collectives.

        Raises:
            UsageError: No process has a sample.
        """
        if all(report.is_empty for report in reports):
            raise UsageError(
                "a step needs samples, got batches without any; leave empty batches "
                "out of the data, or accumulate them with others."
            )
        if self.processes.count > 1:
            return batches
        return [batch for batch in batches if has_samples(batch)]

    def step(
        self, batches: Sequence[Any], reports: Sequence[Report], *, number: int
    ) -> StepResult:
        """Make one step of several batches that all processes have reported.

        Raises:
            torch.OutOfMemoryError: It does not fit, and no measure is left.
                Gradients, buffers and random states are restored.
            PeerError: Another process has failed.
        """
        start = time.perf_counter()
        if self._is_broken:
            raise UnsupportedError(
                "an earlier step failed while a sharded model was accumulating "
                "gradients, which cannot be removed from it; resume in a new process."
            )
        careful = (
            self.processes.count > 1
            and self._may_recover
            and any(report.is_new for report in reports)
        )
        # Clear gradients of others first; after the step, before the next forward.
        self._clear_gradients()
        if self._may_undo:
            self._before.take()
        with self.peaks.next() as peak:
            loss, parts = self._gradients(batches, reports, careful=careful)
            outcome, norm, scale = self._move()
        self._take_back(outcome)
        self._clear_gradients()
        if self.processes.count > 1:
            self._known_shapes |= _shapes(batches)
        return StepResult(
            number=number,
            parts=parts,
            seconds=time.perf_counter() - start,
            loss_tensor=loss,
            norm_tensor=norm,
            used_scale=scale,
            peak=peak,
            outcome=outcome,
        )

    def rehearse(self, batches: Sequence[Any]) -> None:
        """Compute gradients as a step would, of at most two parts, and leave them.

        With the gradients of a part alive, the next one needs as much memory as all
        later ones. Processes with a model each exchange nothing; those with shards of
        one must call it together.
        """
        parts = self.recovery.cut(batches)[:2]
        # Gradients that a sharded model accumulates could not be removed from it.
        self._attempt(parts, total=0.0, synchronise=self.processes.is_sharded)

    def _decide_recovery(self) -> bool:
        wanted = self._settings.recover_from_out_of_memory
        if wanted and not self.processes.may_recover:
            raise UnsupportedError(
                f"expected a model that one process can retry alone with "
                f"recover_from_out_of_memory=True. {_CANNOT_GO_BACK}"
            )
        return wanted is not False and self.processes.may_recover

    def _gradients(
        self, batches: Sequence[Any], reports: Sequence[Report], *, careful: bool
    ) -> tuple[Tensor, int]:
        """Compute gradients, with further measures until they fit in memory."""
        total = reports[0].weight
        if len(reports) > 1:
            total = sum(report.weight for report in reports) / len(reports)
        while True:
            found = self._try(batches, total, careful=careful)
            if found is not None:
                return found
            if self.device.type != "cpu":
                torch.accelerator.empty_cache()

    def _try(
        self, batches: Sequence[Any], total: float, *, careful: bool
    ) -> tuple[Tensor, int] | None:
        """Compute gradients; return None if memory ran out and a measure was taken."""
        parts = self.recovery.cut(batches)
        failed, loss = 0, None
        try:
            with self.processes.watching():
                loss = self._attempt(parts, total, synchronise=not careful)
        except BaseException as error:
            self._undo()
            self._is_broken = self.processes.is_sharded and len(parts) > 1
            memory = is_out_of_memory(error)
            if careful and not memory:
                self.processes.exchange(Report(failed=FAILED))
            if not memory or not (careful or self._relieve(batches, error)):
                raise
            failed = OUT_OF_MEMORY
        # The exception, and the values that its frames kept alive, are gone here.
        if careful:
            failed = self._agree(batches, failed)
        if failed or loss is None:
            self._undo()
            return None
        if careful:
            self.processes.average_gradients(self._parameters)
        return loss, len(parts)

    @calls_user
    def _attempt(
        self, parts: Sequence[Any], total: float, *, synchronise: bool
    ) -> Tensor:
        count, reduction = self.processes.count, self._reduction
        weights = shares = [1.0]
        if count > 1 or len(parts) > 1:
            weights = [reduction.weigh(part) for part in parts]
            shares = reduction.shares(weights, None if count == 1 else total, count)
        losses: list[Tensor] = []
        for index, (part, share) in enumerate(zip(parts, shares, strict=True)):
            last = index == len(parts) - 1
            with self.processes.accumulating(last=last and synchronise):
                part = to_device(part, self.device)
                with self.precision:
                    loss = self._loss(part, several=len(parts) > 1 or count > 1)
                # Multiplying by one changes no bit, but adds to the graph.
                weighted = loss if share == 1.0 else loss * share
                scaled = self.scaler.scale(weighted) if self.scaler else weighted
                scaled.backward()
            losses.append(loss.detach())
            del loss, weighted, scaled, part
        return reduction.combine(losses, weights)

    def _loss(self, part: Any, *, several: bool) -> Tensor:
        """Return the loss of a part; check the first one if batches are split."""
        proof = self._proof
        if proof is None or proof.is_over or not several:
            return compute_loss(self._model, part, self._loss_fn)
        loss = compute_loss(self._model, part, partial(proof.loss, part))
        if proof.finding is not None:
            self.recovery.refuse_to_split(proof.finding)
        return loss

    def _take_back(self, outcome: StepOutcome) -> None:
        """Restore buffers and random states if the step was skipped.

        If only the device knows so far, it restores by itself: the host need not wait
        and launches the next step meanwhile.
        """
        flag = outcome.flag
        if flag is not None and self._before.can_restore_on(flag.device):
            self._before.buffers.restore_if(flag)
        elif outcome.skipped:
            self._before.restore()

    @calls_user
    def _move(self) -> tuple[StepOutcome, Tensor | None, Tensor | float | None]:
        """Unscale, clip, and step if everything is finite."""
        settings, scaler = self._settings, self.scaler
        scale = None
        if scaler is not None:
            scale = scaler.known_scale
            if scale is None:
                assert scaler.scale_tensor is not None, "backward scaled a loss"
                scale = scaler.scale_tensor.clone()
            if settings.max_gradient_norm is not None:
                scaler.unscale_(self._optimizer)
        norm = self._clip()
        if scaler is not None:
            scaler.step(self._optimizer)
            if self.learns_late:
                skipped = scaler.skip_flag(self._optimizer)
            else:
                skipped = scaler.step_was_skipped(self._optimizer)
            scaler.update()
            return StepOutcome(skipped), norm, scale
        if settings.skip_nonfinite:
            assert norm is not None, "computed for this"
            if not bool(whole(norm).isfinite()):
                return StepOutcome(True), norm, scale
        self._optimizer.step()
        return StepOutcome(False), norm, scale

    def _clip(self) -> Tensor | None:
        settings = self._settings
        if settings.max_gradient_norm is not None:
            return nn.utils.clip_grad_norm_(
                self._parameters, settings.max_gradient_norm
            ).detach()
        if settings.skip_nonfinite and self.scaler is None:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            return nn.utils.get_total_norm(gradients)
        return None

    def _relieve(self, batches: Sequence[Any], error: BaseException) -> bool:
        """Take the next measure, or add the reason for having none to the error."""
        if not self._may_recover:
            if self._settings.recover_from_out_of_memory is None:
                error.add_note(f"recoup: {_CANNOT_GO_BACK}")
            return False
        if self.recovery.relieve(batches) is not None:
            return True
        error.add_note(f"recoup: {self.recovery.why_not(batches)}.")
        return False

    def _agree(self, batches: Sequence[Any], failed: int) -> int:
        """Exchange outcomes; take a measure together if a process ran out of memory."""
        worst = max(
            each.failed for each in self.processes.exchange(Report(failed=failed))
        )
        if worst == FAILED:
            self._undo()
            raise PeerError(
                "another process of this run has failed; see its output. This step was "
                "undone here."
            )
        if worst == OUT_OF_MEMORY and self.recovery.relieve(batches) is None:
            self._undo()
            raise torch.OutOfMemoryError(
                "a process ran out of memory, and no measure is left: "
                f"{self.recovery.why_not(batches)}"
            )
        return worst

    def _undo(self) -> None:
        self._clear_gradients()
        if self._may_undo:
            self._before.restore()

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def _shapes(batches: Sequence[Any]) -> set[Any]:
    return {
        tuple((tuple(t.shape), t.dtype) for t in tensors_in(batch)) for batch in batches
    }

"""Full precision, mixed precision, checkpointing, both: the cost of each."""

import copy
import functools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recoup.backend.memory.meters import is_out_of_memory
from recoup.backend.state.snapshots import Gradients, StateSnapshot
from recoup.core.display import as_html, table
from recoup.core.units import print_bytes, print_seconds
from recoup.errors import UsageError
from recoup.measurement.timing.pace import seconds_of
from recoup.precision.mixed_precision import resolve_precision
from recoup.train.data.batches import LossFunction
from recoup.train.run_results import StepResult
from recoup.train.settings import TrainerSettings, check_count_or_none
from recoup.train.trainer import Trainer

_ROWS = (
    ("Baseline (FP32)", False, False),
    ("Mixed Precision", True, False),
    ("Checkpointing", False, True),
    ("Both", True, True),
)


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """The cost of a step in one configuration.

    Attributes:
        name: The configuration.
        peak_bytes: The peak of the step; None if it ran out of memory.
        seconds: Median time of the step; None if it did not fit.
    """

    name: str
    peak_bytes: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """The four configurations, compared with the first.

    Attributes:
        precision: The format of mixed precision here.
        rows: Full precision, mixed precision, checkpointing, both.
    """

    precision: str
    rows: tuple[ComparisonRow, ...]

    def __repr__(self) -> str:
        return f"Comparison in {self.precision}\n{self}"

    def _repr_html_(self) -> str:
        return as_html(repr(self))

    @property
    def verdict(self) -> str:
        """The leanest configuration, in one sentence."""
        base, ran = self.rows[0], [row for row in self.rows if row.peak_bytes]
        if not ran:
            return "No configuration fits: all ran out of memory."
        leanest = min(ran, key=lambda row: row.peak_bytes or 0)
        compared = (
            f"{_share(leanest.peak_bytes or 0, base.peak_bytes)} of the baseline's "
            f"memory and {_share(leanest.seconds or 0, base.seconds)} of its time"
            if base.peak_bytes
            else "the baseline is out of memory"
        )
        peak = print_bytes(leanest.peak_bytes or 0)
        return f"Least memory: {leanest.name}, {peak}, {compared}."

    def __str__(self) -> str:
        base = self.rows[0]
        rows = [
            (
                row.name,
                print_bytes(row.peak_bytes),
                _share(row.peak_bytes, base.peak_bytes),
                print_seconds(row.seconds),
                _share(row.seconds, base.seconds),
            )
            if row.peak_bytes is not None and row.seconds is not None
            else (row.name, "out of memory", "", "", "")
            for row in self.rows
        ]
        return table(("configuration", "memory", "", "step", ""), rows, ruled=False)


def compare_configurations(  # noqa: PLR0913 (options by keyword)
    model: nn.Module,
    batch: Any,
    *,
    optimizer: Optimizer | None = None,
    loss_fn: LossFunction | None = None,
    precision: str = "auto",
    checkpoint_segment_size: int | None = None,
    repeats: int = 5,
) -> Comparison:
    """Measure a training step in four configurations, on this machine.

    A step is forward, backward and the optimizer's step. The state of the model, the
    optimizer and the random generators is restored afterwards. Costs about
    `4 * (repeats + 3)` steps, and a copy of all state in host memory.

    Args:
        model: The model, on the device of the training.
        batch: A batch for `Trainer.step`.
        optimizer: By default AdamW.
        loss_fn: As for `Trainer`.
        precision: The format of mixed precision.
        checkpoint_segment_size: As in `TrainerSettings`, for the two rows with
            checkpointing.
        repeats: The number of timed steps per configuration.

    Raises:
        UsageError: The model has no blocks to recompute, the segment size is not a
            positive integer, or `precision` does not have 16 bits.

    Examples:
        >>> layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
        >>> model, batch = nn.Sequential(*layers), (torch.ones(4, 8), torch.ones(4, 8))
        >>> table = compare_configurations(
        ...     model, batch, loss_fn=nn.functional.mse_loss, repeats=1
        ... )
        >>> [row.name for row in table.rows]
        ['Baseline (FP32)', 'Mixed Precision', 'Checkpointing', 'Both']
    """
    check_count_or_none("checkpoint_segment_size", checkpoint_segment_size)
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    device = next(iter(model.parameters())).device
    dtype = resolve_precision(precision, device)
    if dtype is torch.float32:
        raise UsageError(
            "expected 'bf16', 'fp16' or 'auto' to compare with full precision, got "
            "'fp32'."
        )
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    make = functools.partial(Trainer, model, optimizer, loss_fn=loss_fn)
    rows: list[ComparisonRow] = []
    with _untouched(model, optimizer, device) as rewind:

        def step(trainer: Trainer) -> StepResult:
            rewind()
            return trainer.step(batch)

        for title, mixed, recomputed in _ROWS:
            settings = TrainerSettings(
                precision=name if mixed else "fp32",
                use_gradient_checkpointing=recomputed,
                checkpoint_segment_size=checkpoint_segment_size if recomputed else None,
                recover_from_out_of_memory=False,
                measure_memory=False,
            )
            rows.append(_measure(title, settings, make, step, repeats=repeats))
    return Comparison(name, tuple(rows))


def _measure(
    title: str,
    settings: TrainerSettings,
    make: Callable[..., Trainer],
    step: Callable[[Trainer], StepResult],
    *,
    repeats: int,
) -> ComparisonRow:
    trainer: Trainer | None = None
    try:
        # On the CPU measuring memory takes time: time and memory have separate steps.
        trainer = make(settings=settings)
        for _ in range(2):
            step(trainer)
        call = functools.partial(step, trainer)
        seconds = [seconds_of(call, trainer.device) for _ in range(repeats)]
        trainer.release()
        trainer = make(settings=replace(settings, measure_memory=True))
        peak_bytes = step(trainer).peak_bytes
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return ComparisonRow(title, None, None)
    finally:
        if trainer is not None:
            trainer.release()
    return ComparisonRow(title, peak_bytes, statistics.median(seconds))


@contextmanager
def _untouched(
    model: nn.Module, optimizer: Optimizer, device: torch.device
) -> Iterator[Callable[[], None]]:
    """Restore parameters, buffers, optimizer and generators at the end.

    Yields a function that restores the generators: a model that skips blocks at random
    must skip the same ones in every compared step.
    """
    parameters = list(model.parameters())
    copies = [parameter.detach().to("cpu", copy=True) for parameter in parameters]
    before = StateSnapshot(model, devices=[device], on_cpu=True)
    gradients = Gradients(parameters)
    moments = copy.deepcopy(optimizer.state_dict())
    try:
        yield before.generators.restore
    finally:
        with torch.no_grad():
            for parameter, kept in zip(parameters, copies, strict=True):
                parameter.copy_(kept)
        gradients.restore()
        optimizer.load_state_dict(moments)
        before.restore()


def _share(value: float, base: float | None) -> str:
    return "" if base is None else f"{value / base:.0%}"

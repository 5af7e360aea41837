"""The settings of a training run, checked before it starts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_type_hints

from recoup.core.units import parse_bytes
from recoup.errors import UsageError
from recoup.fitting.fit import Compile, check_compile
from recoup.precision.mixed_precision import Precision, check_precision


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The settings of a `Trainer`.

    Attributes:
        epochs: The number of passes over the data of `fit`.
        batch_size: Samples per batch, if `fit` gets a dataset instead of a loader.
        enable_mixed_precision: Compute in 16 bits where that is safe.
        precision: The format: `"bf16"`, `"fp16"`, `"fp32"` or `"auto"`. By default
            `"auto"` with mixed precision and `"fp32"` without; a format of 16 bits
            enables mixed precision by itself.
        initial_loss_scale: The first loss scale; used with fp16 only.
        loss_scale_growth_interval: Finite steps before the loss scale doubles.
        dynamic_loss_scale: False keeps the loss scale constant.
        use_gradient_checkpointing: Recompute the repeated blocks of the model in
            backward: its layers, not its embedding, stem or head.
        checkpoint_segment_size: The number of consecutive blocks that are recomputed
            together and hold one input; by default 1.
        budget: The peak bytes that a step may use on the device, as a number or as
            in `"8GiB"`; `fit` then plans what to keep and what to recompute.
        compile: The executor of the blocks within the budget, as for `recoup.fit`; for
            one process.
        accumulation_steps: Batches whose gradients make one step.
        max_gradient_norm: Clip gradients to this norm.
        average_decay: Keep an exponential average of the parameters with this decay.
        schedule_each: Advance the schedule after each `"step"` or each `"epoch"`.
        skip_nonfinite: Skip steps with nonfinite gradients in fp32 and bf16 too, which
            synchronises once a step; in fp16 they are always skipped.
        recover_from_out_of_memory: Recompute more, then split the batch, when a step
            does not fit. By default wherever it is possible; True refuses a model for
            which one process cannot retry alone: sharded, with a static graph, or with
            batch statistics over processes.
        measure_memory: Measure every step's peak bytes. By default on accelerators,
            which are read when a result's `peak_bytes` is; True reads at the end of
            each step. Elsewhere it takes some ten microseconds per operator.
        snapshot_path: The file to which `fit` writes snapshots for resuming.
        snapshot_every_steps: Steps between snapshots; by default one per epoch.
        snapshot_keep: The number of snapshots that `fit` keeps: the last ones are also
            at `snapshot_path` with the number of their step, as `run.1200`. By default
            only the last one is kept.
        show_progress: Show a progress bar.

    Raises:
        UsageError: A setting is out of range, or two contradict each other.

    Examples:
        >>> TrainerSettings(precision="bf16").mixed_precision
        'bf16'
        >>> TrainerSettings(epochs=0)
        Traceback (most recent call last):
        ...
        recoup.errors.UsageError: expected epochs to be an integer of at least 1, got 0.
    """

    epochs: int = 1
    batch_size: int | None = None
    enable_mixed_precision: bool = False
    precision: Precision | None = None
    initial_loss_scale: float = 65536.0
    loss_scale_growth_interval: int = 2000
    dynamic_loss_scale: bool = True
    use_gradient_checkpointing: bool = False
    checkpoint_segment_size: int | None = None
    budget: int | str | None = None
    compile: Compile = False
    accumulation_steps: int = 1
    max_gradient_norm: float | None = None
    average_decay: float | None = None
    schedule_each: Literal["step", "epoch"] = "step"
    skip_nonfinite: bool = False
    recover_from_out_of_memory: bool | None = None
    measure_memory: bool | None = None
    snapshot_path: str | Path | None = None
    snapshot_every_steps: int | None = None
    snapshot_keep: int | None = None
    show_progress: bool = False

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            check = _CHECKS.get(kind)
            if check is not None:
                check(name, getattr(self, name))
        _check_between("initial_loss_scale", self.initial_loss_scale, 1.0, 2.0**32)
        if self.max_gradient_norm is not None:
            _check_between("max_gradient_norm", self.max_gradient_norm, 0.0, math.inf)
            if self.max_gradient_norm == 0:
                raise UsageError(
                    "expected max_gradient_norm above 0, got 0, which would make every "
                    "gradient zero; leave it out to clip nothing."
                )
        if self.average_decay is not None:
            _check_between("average_decay", self.average_decay, 0.0, 1.0)
        if self.schedule_each not in ("step", "epoch"):
            raise UsageError(
                f"expected schedule_each='step' or 'epoch', got {self.schedule_each!r}."
            )
        self._check_combinations()

    @property
    def mixed_precision(self) -> str:
        """The precision to compute in, `fp32` without mixed precision."""
        if self.precision is None:
            return "auto" if self.enable_mixed_precision else "fp32"
        return self.precision

    def _check_combinations(self) -> None:
        if self.precision is not None:
            check_precision(self.precision)
        if self.precision == "fp32" and self.enable_mixed_precision:
            raise UsageError(
                "enable_mixed_precision=True contradicts precision='fp32'; leave one "
                "of them out."
            )
        if self.checkpoint_segment_size is not None:
            self._check_segment_size()
        check_compile(self.compile)
        if self.compile and self.budget is None:
            raise UsageError(
                f"expected a budget with compile={self.compile!r}, got none: blocks "
                "are compiled to fit it. Give budget=, or call torch.compile yourself."
            )
        if self.budget is not None:
            parse_bytes(self.budget)
            if self.use_gradient_checkpointing:
                raise UsageError(
                    "expected budget= or use_gradient_checkpointing=True, got both: a "
                    "budget plans what to recompute. Give one of them."
                )
        for name in ("snapshot_every_steps", "snapshot_keep"):
            if getattr(self, name) is not None and self.snapshot_path is None:
                raise UsageError(f"{name} needs snapshot_path, the file to write to.")

    def _check_segment_size(self) -> None:
        if self.budget is not None:
            raise UsageError(
                "expected budget= or checkpoint_segment_size, got both: a budget plans "
                "by itself what is recomputed together. Give one of them."
            )
        if not self.use_gradient_checkpointing:
            raise UsageError(
                f"checkpoint_segment_size={self.checkpoint_segment_size} needs "
                "use_gradient_checkpointing=True; set it, or leave the size out."
            )


def check_count(name: str, value: object) -> None:
    """Raise unless a setting is a positive integer.

    Examples:
        >>> check_count("epochs", 3)
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(
            f"expected {name} to be an integer of at least 1, got {value!r}."
        )


def check_count_or_none(name: str, value: object) -> None:
    """Raise unless an optional setting is None or a positive integer."""
    if value is not None:
        check_count(name, value)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"expected {name} to be True or False, got {value!r}.")


def _check_flag_or_none(name: str, value: object) -> None:
    if value is not None:
        _check_flag(name, value)


_CHECKS: dict[object, Callable[[str, object], None]] = {
    int: check_count,
    int | None: check_count_or_none,
    bool: _check_flag,
    bool | None: _check_flag_or_none,
}
"""The checks of settings by their type."""


def _check_between(name: str, value: float, least: float, largest: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and least <= value <= largest and value != math.inf):
        raise UsageError(
            f"expected {name} between {least:g} and {largest:g}, got {value!r}."
        )

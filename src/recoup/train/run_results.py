"""The results of a step and of a run: loss, peak, skipped steps."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor, nn

from recoup.backend.memory.meters import AllocatorMeter, MemoryMeter, device_meter
from recoup.train.saving.run_state import whole


class Peak:
    """The peak of one step, which runs in its block.

    Examples:
        >>> with Peak(device_meter("cpu"), at_once=True) as peak:
        ...     ones = torch.ones(1000)
        >>> peak.bytes
        4000
    """

    __slots__ = "__weakref__", "_at_once", "_bytes", "_meter"

    def __init__(self, meter: MemoryMeter | None, *, at_once: bool) -> None:
        self._meter = meter
        self._at_once = at_once
        self._bytes: int | None = None

    @property
    def bytes(self) -> int | None:
        """The peak bytes; None if they are not measured."""
        if self._meter is not None:
            self._bytes = self._meter.peak_bytes
            self._meter = None
        return self._bytes

    def __enter__(self) -> Self:
        if self._meter is not None:
            self._meter.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._meter is not None and self._at_once:
            self._meter.__exit__(*exception)
            _ = self.bytes


class Peaks:
    """Measures every step, at low cost by default.

    An allocator counts anyway, but reading it takes as much host time as some ten
    operators. So it is read when a step's peak is read, or when the next step begins
    while the last result is referenced. Memory used between the end of the step and
    that moment counts as well, unless measuring was requested: then it is read when the
    step ends.

    Args:
        device: The device of the steps.
        wanted: Whether to measure; by default on accelerators only.
        existing: Returns the tensors that exist before a step, for devices without an
            allocator that counts.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        wanted: bool | None,
        existing: Callable[[], Iterable[Tensor | nn.Module]],
    ) -> None:
        self._device = device
        self._has_allocator = isinstance(device_meter(device), AllocatorMeter)
        self._is_wanted = self._has_allocator if wanted is None else wanted
        self._at_once = wanted is True or not self._has_allocator
        self._existing = existing
        self._last: ref[Peak] | None = None

    def next(self) -> Peak:
        """Return the peak of the step that begins."""
        if not self._is_wanted:
            return Peak(None, at_once=True)
        if not self._has_allocator:
            meter = device_meter(self._device)
            meter.track(*self._existing())
            return Peak(meter, at_once=True)
        self.settle()
        peak = Peak(AllocatorMeter(self._device), at_once=self._at_once)
        self._last = ref(peak)
        return peak

    def settle(self) -> None:
        """Read the peak of the last step now, if its result is referenced."""
        last = None if self._last is None else self._last()
        if last is not None:
            _ = last.bytes


class StepOutcome:
    """Whether a step was skipped: known, or still to come from the device.

    Reading it waits for the step, and for nothing launched after it.

    Examples:
        >>> outcome = StepOutcome(torch.tensor([True]))
        >>> outcome.is_known, outcome.skipped, outcome.is_known
        (False, True, True)
    """

    __slots__ = ("_arrived", "_copy", "_skipped", "flag")

    def __init__(self, skipped: bool | Tensor) -> None:  # noqa: FBT001 (the outcome)
        self._skipped: bool | None = None
        self._arrived: torch.Event | None = None
        self.flag: Tensor | None = None
        if isinstance(skipped, Tensor):
            self.flag = skipped
            self._copy = skipped.to("cpu", non_blocking=True)
            if skipped.device.type != "cpu":
                self._arrived = torch.Event(skipped.device)
                self._arrived.record()
        else:
            self._skipped = skipped

    @property
    def is_known(self) -> bool:
        """Whether the host already knows it."""
        return self._skipped is not None

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped; waits for the device."""
        if self._skipped is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._skipped = bool(self._copy)
            self.flag = self._arrived = None
        return self._skipped


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step of a `Trainer`.

    Numbers that a device computed are read on access, and only then does the host wait.

    Attributes:
        number: The number of the step, from 1; skipped ones count.
        parts: The number of pieces in which the step's batches were computed.
        seconds: The host's time. It does not wait for an accelerator.
    """

    number: int
    parts: int
    seconds: float
    loss_tensor: Tensor = field(repr=False)
    norm_tensor: Tensor | None = field(repr=False)
    used_scale: Tensor | float | None = field(repr=False)
    peak: Peak = field(repr=False)
    outcome: StepOutcome = field(repr=False)

    @property
    def stepped(self) -> bool:
        """Whether the parameters were updated; False if the gradients overflowed."""
        return not self.outcome.skipped

    @property
    def skipped(self) -> bool:
        """Whether the parameters stayed unchanged."""
        return self.outcome.skipped

    @property
    def peak_bytes(self) -> int | None:
        """The peak bytes of the step on the device, if measured.

        With `measure_memory=True` it is exact. By default an accelerator is read on
        access, or at the latest when the next step begins: other work on it since the
        step counts too.
        """
        return self.peak.bytes

    @property
    def loss(self) -> float:
        """The weighted mean of the losses of this process's batches."""
        return float(whole(self.loss_tensor).item())

    @property
    def gradient_norm(self) -> float | None:
        """The norm of all gradients before clipping, if it was computed."""
        if self.norm_tensor is None:
            return None
        return float(whole(self.norm_tensor).item())

    @property
    def scale(self) -> float | None:
        """The loss scale that the step used; None without a scaler."""
        return None if self.used_scale is None else float(self.used_scale)


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of `Trainer.fit`.

    Attributes:
        epochs: The number of finished epochs, including those of earlier runs.
        steps: The number of steps of this run, including skipped ones.
        skipped: The number of skipped ones.
        seconds: The time of this run.
        interrupted: Whether it was requested to stop before the end.
        last: The last step of this run.
    """

    epochs: int
    steps: int
    skipped: int
    seconds: float
    interrupted: bool
    last: StepResult | None

"""Meter: one status line per step of any training loop."""

from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from recoup.core.units import parse_budget, print_bytes, print_seconds
from recoup.engine.replay.recomputing import replay_seconds
from recoup.errors import UsageError
from recoup.fitting.budgets import Budget
from recoup.fitting.fit import Fit


class ScalarWriter(Protocol):
    """A sink of named numbers, such as TensorBoard's `SummaryWriter`."""

    def add_scalar(
        self, tag: str, scalar_value: float, global_step: int | None = None
    ) -> Any:
        """Record a number of a step."""
        ...


@dataclass(frozen=True, slots=True)
class Reading:
    """The reading of a meter for a step.

    Attributes:
        step: The number of steps so far.
        loss: The loss, if one was given.
        seconds: The average time of a step since the last reading.
        peak_bytes: The most bytes in use since the last reading; None if the device
            does not count them.
        budget_bytes: The budget; 0: none.
        replay_share: The share of the host time spent in replays.

    Examples:
        >>> print(Reading(7, 0.25, 1.5, 2**30, 2**31, 0.125))
        step 7  loss 0.25  1.5 s  peak 1 GiB of 2 GiB (50%)  replays 12%
        >>> print(Reading(7, None, 1.5, None, 0, 0.0))
        step 7  1.5 s  replays 0%
    """

    step: int
    loss: float | None
    seconds: float
    peak_bytes: int | None
    budget_bytes: int
    replay_share: float

    def __str__(self) -> str:
        parts = [f"step {self.step}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4g}")
        parts.append(print_seconds(self.seconds))
        if self.peak_bytes is not None:
            peak = f"peak {print_bytes(self.peak_bytes)}"
            if self.budget_bytes:
                share = self.peak_bytes / self.budget_bytes
                peak += f" of {print_bytes(self.budget_bytes)} ({share:.0%})"
            parts.append(peak)
        parts.append(f"replays {self.replay_share:.0%}")
        return "  ".join(parts)


class Meter:
    """Measures a training loop: step, loss, peak versus budget, share of replays.

    On an accelerator each reading reads and resets the allocator's peak. On the CPU,
    where counting would slow down the loop, the peak is omitted. Reading a loss
    synchronises; `every` makes that rare.

    Args:
        budget: The limit of the peak: bytes, text such as "8GiB", or the result of
            `fit`.
        device: The device whose memory is counted; by default the current accelerator,
            if any.
        every: The number of steps per reading.
        writer: Receives every reading as scalars, such as a TensorBoard
            `SummaryWriter`.

    Raises:
        UsageError: The budget is not in bytes, or `every` is below 1.

    Examples:
        >>> meter = Meter("8GiB", device="cpu", every=2)
        >>> for step in range(4):
        ...     reading = meter.step(torch.tensor(0.5))
        ...     if reading is not None:
        ...         print(reading.step, reading.loss)
        2 0.5
        4 0.5
    """

    def __init__(
        self,
        budget: Budget | Fit = None,
        *,
        device: torch.device | str | None = None,
        every: int = 1,
        writer: ScalarWriter | None = None,
    ) -> None:
        if every < 1:
            raise UsageError(f"expected every of at least 1, got {every}.")
        self._device = _device(device)
        self._budget_bytes = _bytes(budget)
        self._every = every
        self._writer = writer
        self._step = 0
        self._begin()

    def step(self, loss: Tensor | float | None = None) -> Reading | None:
        """Count a step; return a reading if one is due, else None.

        Args:
            loss: The loss of the step.
        """
        self._step += 1
        if self._step % self._every:
            return None
        if isinstance(loss, Tensor):
            loss = float(loss.detach())
        elapsed = perf_counter() - self._started
        reading = Reading(
            step=self._step,
            loss=loss,
            seconds=elapsed / self._every,
            peak_bytes=self._peak_bytes(),
            budget_bytes=self._budget_bytes,
            replay_share=(replay_seconds() - self._replayed) / max(elapsed, 1e-9),
        )
        self._write(reading)
        self._begin()
        return reading

    def _begin(self) -> None:
        self._started = perf_counter()
        self._replayed = replay_seconds()
        if self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._device)

    def _peak_bytes(self) -> int | None:
        if self._device.type == "cpu":
            return None
        return torch.accelerator.max_memory_allocated(self._device)

    def _write(self, reading: Reading) -> None:
        if self._writer is None:
            return
        for name, value in (
            ("loss", reading.loss),
            ("seconds", reading.seconds),
            ("peak_bytes", reading.peak_bytes),
            ("replay_share", reading.replay_share),
        ):
            if value is not None:
                self._writer.add_scalar(f"recoup/{name}", value, reading.step)


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator or torch.device("cpu")


def _bytes(budget: Budget | Fit) -> int:
    if isinstance(budget, Fit):
        return budget.budget_bytes
    if budget is None:
        return 0
    found = parse_budget(budget)
    if isinstance(found, float):
        raise UsageError(
            f"expected bytes to compare with, got the share {budget!r}. Give "
            'bytes, as in "8GiB", or what `fit` returned.'
        )
    return found

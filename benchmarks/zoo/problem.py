"""A model of the zoo on a device, and what a step of it costs."""

import gc
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Pace, pace_of, synchronize
from benchmarks.zoo.case import Case, Pair, Scale
from recoup.backend.memory.meters import device_meter

STEPS_IN_A_ROW = 4


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step costs.

    Attributes:
        peak_bytes: The most bytes in use.
        seconds: Its time among others in a row.
        range_seconds: The least and the largest of it, from row to row.
        alone_seconds: Its time with the device idle before it.
    """

    peak_bytes: int
    seconds: float
    range_seconds: tuple[float, float]
    alone_seconds: float


class Problem:
    """A model and its batch on a device, ready to be trained.

    Args:
        case: The model.
        scale: How large it is.
        device: Where it is.
        dtype: The type of its numbers; by default bfloat16 on an accelerator.
        batches: How many batches of the case are one of this problem.
    """

    def __init__(
        self,
        case: Case,
        scale: Scale,
        device: torch.device,
        dtype: torch.dtype | None = None,
        *,
        batches: int = 1,
    ) -> None:
        if dtype is None:
            dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.case = case
        self.device = device
        self.model: nn.Module = case.build(scale, device=device, dtype=dtype)
        inputs, target = case.batch(scale, device=device, dtype=dtype)
        self.batch: Pair = _repeated(inputs, batches), _repeated(target, batches)

    def step(self) -> None:
        """Run forward and backward; the output ends before backward begins."""
        inputs, target = self.batch
        self.case.loss(call(self.model, inputs), target).backward()

    def given(self) -> list[Tensor]:
        """Return the tensors of the batch."""
        inputs, target = self.batch
        return [*_tensors(inputs), target]

    def peak_bytes(self) -> int:
        """Run a step and return the most bytes in use."""
        self.clear()
        with device_meter(self.device) as meter:
            meter.track(self.model, *self.given())
            self.step()
            return meter.peak_bytes

    def seconds(self) -> float:
        """Run a step and return its time."""
        self.clear()
        synchronize(self.device)
        start = time.perf_counter()
        self.step()
        synchronize(self.device)
        return time.perf_counter() - start

    def pace(self, *, steps: int) -> Pace:
        """Run a step by itself and several in a row, and return their times."""

        def step() -> None:
            self.clear()
            self.step()

        return pace_of(step, self.device, steps=steps)

    def cost(self, *, warmup: int = 1, rounds: int = 1) -> Cost:
        """Return the peak of one step and the median time of rows of some."""
        for _ in range(warmup):
            self.seconds()
        peak_bytes = self.peak_bytes()
        paces = [self.pace(steps=STEPS_IN_A_ROW) for _ in range(rounds)]
        self.clear()
        in_a_row = [pace.in_a_row for pace in paces]
        return Cost(
            peak_bytes,
            statistics.median(in_a_row),
            (min(in_a_row), max(in_a_row)),
            statistics.median(pace.alone for pace in paces),
        )

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def free_device(device: torch.device) -> None:
    """Give back what earlier models left, so that it counts for no later one."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def _tensors(inputs: Any) -> list[Tensor]:
    if isinstance(inputs, dict):
        return list(inputs.values())
    return list(inputs) if isinstance(inputs, tuple) else [inputs]


def _repeated(inputs: Any, times: int) -> Any:
    """Return a batch that has every sample so many times."""
    if isinstance(inputs, dict):
        return {name: _repeated(each, times) for name, each in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(_repeated(each, times) for each in inputs)
    return inputs if times == 1 else torch.cat([inputs] * times)

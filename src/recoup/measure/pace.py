"""The pace of a step: how long device and host take when steps follow each other."""

import time
from dataclasses import dataclass

import torch

from recoup.backend.timers import Laps
from recoup.measure.training import TrainingStep

_SAME = 1.05
"""Times that differ by less are taken for one."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a step takes among others.

    Attributes:
        seconds: From one step to the next.
        host_seconds: What the host takes to issue one; on the CPU the same.
    """

    seconds: float
    host_seconds: float

    @property
    def is_bound_by_host(self) -> bool:
        """Whether the device waits for the host."""
        return self.seconds <= _SAME * self.host_seconds


def pace_of(step: TrainingStep, *, repeats: int = 2) -> Pace:
    """Return the least times of a step among some runs that follow each other.

    They are issued as training issues them: the host waits for an accelerator after the
    last one alone, and one that finds it idle comes first and does not count.

    Costs one run more than the repeats beside an accelerator, else as many.
    """
    if step.device.type == "cpu":
        seconds = min(_time_alone(step) for _ in range(repeats))
        return Pace(seconds, seconds)
    laps = Laps(step.device)
    host_seconds: list[float] = []
    between_seconds: list[float] = []
    step.begin()
    for _ in range(repeats + 1):
        start = time.perf_counter()
        step.run()
        laps.mark()
        issued = time.perf_counter()
        step.begin(waiting=False)
        host_seconds.append(issued - start)
        between_seconds.append(time.perf_counter() - issued)
    found, host = min(laps.seconds()), min(host_seconds)
    # Putting the step back to its beginning is not part of it. The device does not
    # wait for that unless it waits for the host in any case.
    between = min(between_seconds)
    if found <= _SAME * (host + between):
        found = max(host, found - between)
    return Pace(found, host)


def _time_alone(step: TrainingStep) -> float:
    step.begin()
    seconds = timed(step)
    step.model.zero_grad(set_to_none=True)
    return seconds


def timed(step: TrainingStep) -> float:
    """Run a step by itself; return how long it took until the device had finished."""
    synchronize(step.device)
    start = time.perf_counter()
    step.run()
    synchronize(step.device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait for a device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

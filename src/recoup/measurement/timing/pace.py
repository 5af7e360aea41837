"""The pace of a step: device and host time per step in a row of steps."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from recoup.backend.operators.timers import Laps
from recoup.measurement.steps.training_step import TrainingStep

_SAME = 1.05
"""Times that differ by less count as equal."""

_UNHINDERED = 0.7
"""If the first run takes less than this share of a later one's host time, the host was
blocked by a full queue in the later run."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The time of a step in a row of steps.

    Attributes:
        seconds: The time from one step to the next.
        host_seconds: The host time of one step; on the CPU the same.
    """

    seconds: float
    host_seconds: float

    @property
    def is_bound_by_host(self) -> bool:
        """Whether the step is CPU-bound."""
        return self.seconds <= _SAME * self.host_seconds


def pace_of(
    step: TrainingStep, *, repeats: int = 2, expected_seconds: float | None = None
) -> Pace:
    """Return the pace of a step, measured in a row of runs.

    As in training, the host synchronises only after the last run. The first run, which
    starts on an idle accelerator, is not counted.

    Costs `repeats` runs, and one more on an accelerator.
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
    return judged(laps.seconds(), host_seconds, between_seconds, expected_seconds)


def judged(
    laps: Sequence[float],
    host: Sequence[float],
    between: Sequence[float],
    expected_seconds: float | None = None,
) -> Pace:
    """Return the pace from the times of runs in a row.

    The device's time is the shortest lap: longer ones were disturbed. A CPU-bound step
    takes the `usual` host time, which varies. The shortest lap and the host time of its
    run show which case it is. If the first run, on an idle device, took much less host
    time, the device's full queue blocked the host, and the step is not CPU-bound.
    Restoring the state is not part of the step; the device waits for it only in a
    CPU-bound step.

    Args:
        laps: The seconds from each run to the next, on the device.
        host: The host time of each run, including the first.
        between: The time after each run to restore the step's state.
        expected_seconds: The predicted time.

    Examples:
        >>> judged([9.0, 8.0], [3.0, 8.0, 8.0], [0.5, 0.5, 0.5])
        Pace(seconds=8.0, host_seconds=3.0)
        >>> judged([9.0, 8.0], [7.0, 8.5, 7.5], [0.5, 0.5, 0.5])
        Pace(seconds=8.0, host_seconds=8.0)
    """
    least = min(range(len(laps)), key=laps.__getitem__)
    issued = host[least + 1]
    keeps_waiting = laps[least] <= _SAME * (issued + between[least])
    if keeps_waiting and host[0] >= _UNHINDERED * issued:
        seconds = usual(host[1:], expected_seconds)
        return Pace(seconds, seconds)
    return Pace(laps[least], min(host))


def usual(times: Sequence[float], expected: float | None = None) -> float:
    """Return a typical value of varying times: the median, without a prediction.

    Else the predicted time, clamped to the interquartile range. A few times that vary
    by 15 % are no better than a prediction; those that agree with each other are.

    Examples:
        >>> usual([1.0, 2.0, 6.0])
        2.0
        >>> usual([1.0, 2.0, 6.0], expected=3.0)
        3.0
        >>> usual([1.0, 2.0, 6.0], expected=5.0)
        4.0
        >>> usual([2.0, 2.0, 2.0], expected=5.0)
        2.0
    """
    if expected is None or len(times) == 1:
        return statistics.median(times)
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return min(max(expected, first), third)


def _time_alone(step: TrainingStep) -> float:
    step.begin()
    seconds = seconds_of(step.run, step.device)
    step.drop_gradients()
    return seconds


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Return the duration of a call until the device has finished."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def least_seconds(
    call: Callable[[], object], device: torch.device, repeats: int
) -> float:
    """Return the shortest duration of repeated calls."""
    return min(seconds_of(call, device) for _ in range(repeats))


def synchronize(device: torch.device) -> None:
    """Wait for a device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

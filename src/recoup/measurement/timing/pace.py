"""The pace of a step: how long device and host take when steps follow each other."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from recoup.backend.operators.timers import Laps
from recoup.measurement.steps.training_step import TrainingStep

_SAME = 1.05
"""Times that differ by less are taken for one."""

_UNHINDERED = 0.7
"""A host that takes longer than the first run did, by more than this, is hindered."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The time of a step in a row of steps.

    Attributes:
        seconds: From one step to the next.
        host_seconds: The host's time for one; on the CPU the same.
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
    """Return the times of a step among some runs that follow each other.

    They are issued as training issues them: the host waits for an accelerator after the
    last one alone, and one that finds it idle comes first and does not count.

    Costs one run more than the repeats with an accelerator, else as many.
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
    """Return the pace that the times of some runs in a row show.

    A device's least time is its time: what is longer was disturbed. A host varies from
    step to step, and is what is waited for: see `usual`. Which of the two it is, one
    lap shows and the run that it is of. A host that had issued the first run,
    to an idle device, in much less time had to wait itself: for room in the device's
    queue. Putting the step back to its beginning is not part of it, and a device does
    not wait for that unless it waits for the host.

    Args:
        laps: The seconds from each run to the next, on the device.
        host: The host's time for each run, the first included.
        between: The time after each to restore the step's state.
        expected_seconds: The time that was predicted.

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
    """Return the usual one of times that vary: the median, if nothing was expected.

    Else what was expected, moved to the nearer quartile where it is not between both. A
    few times that vary by 15 % do not say more than a prediction does; those that agree
    with each other do.

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
    """Return how long a call takes until the device has finished."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def least_seconds(
    call: Callable[[], object], device: torch.device, repeats: int
) -> float:
    """Return the least time of some calls."""
    return min(seconds_of(call, device) for _ in range(repeats))


def synchronize(device: torch.device) -> None:
    """Wait for a device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

"""Operator timing: by events on an accelerator, by the clock elsewhere."""

import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

REPEATS = 3
"""Repetitions for timing an operator at its first occurrence."""

_TRIALS = 5

_LEAST_SECONDS = 1e-6
"""Lower bound on a kernel's time, below the resolution of events."""


class Timer(Protocol):
    """Times operators; each measurement is read later, by its number."""

    def run(self, call: partial[Any]) -> tuple[Any, int]:
        """Run an operator once; return its result and its measurement's number."""
        ...

    def again(self, call: partial[Any], number: int) -> int:
        """Measure an operator again, better; return that measurement's number."""
        ...

    def join(self, number: int, other: int) -> None:
        """Merge two measurements of one call: the smaller one is its time."""
        ...

    def seconds(self, number: int) -> float:
        """Return the duration of one call."""
        ...


class Laps:
    """The times between marks in a device's work; marking does not synchronise.

    Examples:
        >>> laps = Laps(torch.device("cpu"))
        >>> for _ in range(3):
        ...     laps.mark()
        >>> len(laps.seconds())
        2
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Record a mark in the device's work."""
        if self._device.type == "cpu":
            self._marks.append(time.perf_counter())
        else:
            event = torch.Event(self._device, enable_timing=True)
            event.record()
            self._marks.append(event)

    def seconds(self) -> list[float]:
        """Wait for the last mark; return the times between consecutive marks."""
        between = list(itertools.pairwise(self._marks))
        if self._device.type == "cpu":
            return [stop - start for start, stop in between]
        self._marks[-1].synchronize()
        return [start.elapsed_time(stop) / 1000 for start, stop in between]


@dataclass(frozen=True, slots=True)
class Latency:
    """The launch latency that events measure around operators on an idle device.

    The device is idle when a single operator is timed, so the time between events
    includes the host's launch overhead. Measured for one operator, and for `REPEATS`.
    """

    once_seconds: float
    repeated_seconds: float

    @classmethod
    def of(cls, device: torch.device) -> "Latency":
        """Measure it on an idle device."""
        least = torch.zeros(1, device=device)
        once, repeated = (
            min(cls._between_events(device, least, repeats) for _ in range(_TRIALS))
            for repeats in (1, REPEATS)
        )
        return cls(once, max(once, repeated))

    @staticmethod
    def _between_events(device: torch.device, least: Tensor, repeats: int) -> float:
        start = torch.Event(device, enable_timing=True)
        stop = torch.Event(device, enable_timing=True)
        start.record()
        for _ in range(repeats):
            least.add(1)
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1000

    def busy_seconds(self, found_seconds: float, repeats: int) -> float:
        """Return the time of an operator on a busy device.

        Args:
            found_seconds: The time between events around all repeats.
            repeats: One, or `REPEATS`.

        Examples:
            >>> latency = Latency(10.0, 30.0)
            >>> latency.busy_seconds(10.0, 1), latency.busy_seconds(110.0, 1)
            (0.0, 100.0)
            >>> latency.busy_seconds(30.0, 3), latency.busy_seconds(310.0, 3)
            (0.0, 100.0)
        """
        once = self.once_seconds
        all_seconds = once if repeats == 1 else self.repeated_seconds
        if found_seconds >= 2 * all_seconds or not all_seconds:
            # Only the first was launched on an idle device.
            return (found_seconds - once) / repeats
        steepness = (2 * all_seconds - once) / all_seconds
        return max(0.0, found_seconds - all_seconds) * steepness / repeats


class OperatorTimer:
    """Time calls on one device without waiting for each.

    On an accelerator the times are read from events; `seconds` synchronises once, when
    all is done. The launch latency is subtracted.

    Examples:
        >>> timer = OperatorTimer("cpu")
        >>> call = timer.time(lambda: torch.ones(10), repeats=2)
        >>> timer.seconds(call) > 0
        True
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._seconds: list[float] = []
        self._events: list[tuple[Any, Any, int]] = []
        self._on_events = self._device.type != "cpu"
        self._latency = Latency.of(self._device) if self._on_events else None
        self._joined: dict[int, list[int]] = {}

    def time(self, call: Callable[[], Any], *, repeats: int = 1) -> int:
        """Run and time a call; return the measurement's number for `seconds`.

        Args:
            call: The call to run; its result is dropped at once.
            repeats: The number of runs.
        """
        if self._on_events:
            return self._time_by_events(call, repeats)
        least = float("inf")
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            least = min(least, time.perf_counter() - start)
        self._seconds.append(least)
        return len(self._seconds) - 1

    def run(self, call: partial[Any]) -> tuple[Any, int]:
        """Run an operator once; return its result and its measurement's number."""
        box: list[Any] = []
        number = self.time(lambda: box.append(call()))
        return box.pop(), number

    def again(self, call: partial[Any], number: int) -> int:
        """Measure an operator again, because a first run takes longer than later ones.

        If memory runs out, keep the first measurement.
        """
        with contextlib.suppress(torch.OutOfMemoryError):
            number = self.time(call, repeats=REPEATS)
        return number

    def join(self, number: int, other: int) -> None:
        """Merge two measurements of one call: the smaller one is its time."""
        self._joined.setdefault(number, [number]).append(other)

    def seconds(self, number: int) -> float:
        """Return the duration of one call, the shortest of its joined measurements."""
        return min(map(self._one, self._joined.get(number, (number,))))

    def _one(self, number: int) -> float:
        if self._latency is None:
            return self._seconds[number]
        start, stop, repeats = self._events[number]
        stop.synchronize()
        found = self._latency.busy_seconds(start.elapsed_time(stop) / 1000, repeats)
        return max(found, _LEAST_SECONDS)

    def _time_by_events(self, call: Callable[[], Any], repeats: int) -> int:
        start = torch.Event(self._device, enable_timing=True)
        stop = torch.Event(self._device, enable_timing=True)
        start.record()
        for _ in range(repeats):
            call()
        stop.record()
        self._events.append((start, stop, repeats))
        return len(self._events) - 1

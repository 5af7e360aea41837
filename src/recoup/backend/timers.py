"""How long an operator takes: by events on an accelerator, by the clock elsewhere."""

import contextlib
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

REPEATS = 3
"""How often an operator that is met for the first time is run again for its time."""


class Timer(Protocol):
    """Says how long operators take; what it says of a run is asked for by number."""

    def run(self, call: partial[Any]) -> tuple[Any, int]:
        """Run an operator once; return its result and the number of its time."""
        ...

    def again(self, call: partial[Any], number: int) -> int:
        """Return the number of a better time for an operator that has run."""
        ...

    def join(self, number: int, other: int) -> None:
        """Take two times for times of one call: the least is its time."""
        ...

    def seconds(self, number: int) -> float:
        """Return how long one call took."""
        ...


class Laps:
    """The times between points in the work of a device, which nobody waits for.

    Args:
        device: Where the work is done.

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
        """Take note of the point that the device's work has reached."""
        if self._device.type == "cpu":
            self._marks.append(time.perf_counter())
        else:
            event = torch.Event(self._device, enable_timing=True)
            event.record()
            self._marks.append(event)

    def seconds(self) -> list[float]:
        """Wait for the last point, and return the times between them."""
        between = list(itertools.pairwise(self._marks))
        if self._device.type == "cpu":
            return [stop - start for start, stop in between]
        self._marks[-1].synchronize()
        return [start.elapsed_time(stop) / 1000 for start, stop in between]


class OperatorTimer:
    """Time calls on one device without waiting for each.

    On an accelerator the times are read from events when all is done; `seconds` then
    synchronises, once.

    Args:
        device: Where the calls compute.

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
        self._joined: dict[int, list[int]] = {}

    def time(self, call: Callable[[], Any], *, repeats: int = 1) -> int:
        """Run a call some times; return a number to ask `seconds` for.

        Args:
            call: What to run; what it returns is dropped at once.
            repeats: How many times.
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
        """Run an operator once; return its result and the number of its time."""
        box: list[Any] = []
        number = self.time(lambda: box.append(call()))
        return box.pop(), number

    def again(self, call: partial[Any], number: int) -> int:
        """Run an operator again, whose first run takes longer than later ones.

        Where memory is short, its one run will do.
        """
        with contextlib.suppress(torch.OutOfMemoryError):
            number = self.time(call, repeats=REPEATS)
        return number

    def join(self, number: int, other: int) -> None:
        """Take two times for times of one call: the least is its time."""
        self._joined.setdefault(number, [number]).append(other)

    def seconds(self, number: int) -> float:
        """Return how long one call took, or the fastest of those joined to it."""
        return min(map(self._one, self._joined.get(number, (number,))))

    def _one(self, number: int) -> float:
        if not self._on_events:
            return self._seconds[number]
        start, stop, repeats = self._events[number]
        stop.synchronize()
        return start.elapsed_time(stop) / 1000 / repeats

    def _time_by_events(self, call: Callable[[], Any], repeats: int) -> int:
        start = torch.Event(self._device, enable_timing=True)
        stop = torch.Event(self._device, enable_timing=True)
        start.record()
        for _ in range(repeats):
            call()
        stop.record()
        self._events.append((start, stop, repeats))
        return len(self._events) - 1

"""Bytes in use between marks of a run, as the device's allocator sees them.

Unlike a `StorageMeter` this needs no dispatch mode, under which compiled code would run
uncompiled. On an accelerator the allocator's statistics are read at each mark; on the
CPU the profiler records every allocation.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple, Self

import torch
from torch._C import _profiler as profiler

from recoup.backend.memory.meters import AllocatorMeter

_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 (no stub)
_MARK = "recoup mark "


class Interval(NamedTuple):
    """What happened between two marks.

    Attributes:
        mark: The mark that began it; None for the first.
        live_bytes: Bytes in use at its begin.
        peak_bytes: The most bytes in use in it.
    """

    mark: Hashable
    live_bytes: int
    peak_bytes: int


def interval_meter(device: torch.device) -> "IntervalMeter":
    """Return a meter for a device; it counts from zero at entry on the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and device.type == accelerator.type:
        return _AllocatorIntervals(device)
    return _ProfiledIntervals()


class IntervalMeter:
    """Records the bytes in use between marks; read `intervals` after leaving."""

    intervals: list[Interval]

    def __enter__(self) -> Self:
        """Begin the first interval."""
        raise NotImplementedError

    def __exit__(self, *exception: Any) -> None:
        """End the last interval."""
        raise NotImplementedError

    def mark(self, name: Hashable) -> None:
        """Begin an interval."""
        raise NotImplementedError

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use in any interval."""
        return max(interval.peak_bytes for interval in self.intervals)


class _AllocatorIntervals(IntervalMeter):
    def __init__(self, device: torch.device) -> None:
        self._meter = AllocatorMeter(device)
        self._begun: tuple[Hashable, int] = (None, 0)

    def __enter__(self) -> Self:
        self.intervals = []
        self._meter.__enter__()
        self._begun = (None, self._meter.live_bytes)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._end()
        self._meter.__exit__(*exception)

    def mark(self, name: Hashable) -> None:
        self._end()
        self._meter.reset_peak()
        self._begun = (name, self._meter.live_bytes)

    def _end(self) -> None:
        self.intervals.append(Interval(*self._begun, self._meter.peak_bytes))


class _ProfiledIntervals(IntervalMeter):
    """Reads allocations from torch's first profiler, which records nothing else."""

    def __enter__(self) -> Self:
        self._names: list[Hashable] = []
        config = profiler.ProfilerConfig(
            profiler.ProfilerState.CPU,
            False,  # shapes
            True,  # memory
            False,  # stacks
            False,  # FLOPs
            False,  # modules
            profiler._ExperimentalConfig(),
        )
        _autograd._enable_profiler_legacy(config)
        return self

    def __exit__(self, *exception: Any) -> None:
        threads = _autograd._disable_profiler_legacy()
        # Each thread has its own list; all that allocate are in the first one here,
        # because autograd runs backward on the CPU in the thread that calls it.
        start = threads[0][0]
        events = sorted(
            (event for thread in threads for event in thread), key=start.cpu_elapsed_us
        )
        self.intervals = []
        mark: Hashable = None
        live = begun = peak = 0
        for event in events:
            if event.kind() == "memory_alloc":
                live += event.cpu_memory_usage()
                peak = max(peak, live)
            elif event.kind() == "push" and event.name().startswith(_MARK):
                self.intervals.append(Interval(mark, begun, peak))
                mark = self._names[int(event.name().removeprefix(_MARK))]
                begun = peak = live
        self.intervals.append(Interval(mark, begun, peak))

    def mark(self, name: Hashable) -> None:
        number = len(self._names)
        self._names.append(name)
        with torch.profiler.record_function(f"{_MARK}{number}"):
            pass

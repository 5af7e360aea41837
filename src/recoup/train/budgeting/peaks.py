"""The peak of each step, read from an accelerator only if somebody wants to know."""

from collections.abc import Callable, Iterable
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor, nn

from recoup.backend.memory.meters import AllocatorMeter, MemoryMeter, device_meter


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
        """The most bytes alive at once; None if nobody measures."""
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
    """Measures every step, at the price that its figure is worth.

    An allocator counts anyway, but reading it takes the host as long as some ten
    operators. So it is read when a step's peak is asked for, or when the next step
    begins and somebody still has the result of the last. What runs between the end of
    the step and that moment counts as well, unless measuring was asked for: then it
    is read when the step ends.

    Args:
        device: Where the steps compute.
        wanted: Whether to measure; by default on accelerators only.
        existing: Returns what exists before a step, which only an allocator knows of.
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
        """Read the peak of the last step now, if somebody has its result."""
        last = None if self._last is None else self._last()
        if last is not None:
            _ = last.bytes

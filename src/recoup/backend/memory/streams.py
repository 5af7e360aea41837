"""Ordered copies between device and host that overlap with the computation."""

import functools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class StreamMark(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Return whether everything before the point has run."""
        ...

    def synchronize(self) -> None:
        """Wait on this thread until everything before the point has run."""
        ...


class Streams(Protocol):
    """Two copy queues that overlap with the computation: to the host and back.

    No method blocks the calling thread.
    """

    is_concurrent: bool
    """Whether copies overlap with the computation, so that their order matters."""

    def allocate(self, nbytes: int) -> Tensor:
        """Return device memory, which the current stream may still be using."""
        ...

    def now(self) -> StreamMark:
        """Return the point that the computation's queue has reached on this thread."""
        ...

    def copy_out(
        self, destination: Tensor, source: Tensor, *, after: Sequence[StreamMark]
    ) -> StreamMark:
        """Queue a copy to the host, to run after the marks; return its own mark."""
        ...

    def copy_in(
        self, destination: Tensor, source: Tensor, *, after: Sequence[StreamMark]
    ) -> StreamMark:
        """Queue a copy to the device, to run after the marks; return its own mark."""
        ...

    def hold_back(self, mark: StreamMark) -> None:
        """Make computation that is queued from now on wait for the mark."""
        ...


class DeviceStreams:
    """The streams of one accelerator."""

    is_concurrent = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.Stream(device)
        self._in = torch.Stream(device)

    def allocate(self, nbytes: int) -> Tensor:
        """Return memory allocated on the current stream."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def now(self) -> StreamMark:
        """Return the point that the current stream has reached."""
        return torch.accelerator.current_stream(self._device).record_event()

    def copy_out(
        self, destination: Tensor, source: Tensor, *, after: Sequence[StreamMark]
    ) -> StreamMark:
        """Queue a copy to pinned memory."""
        return _queue(self._out, destination, source, after)

    def copy_in(
        self, destination: Tensor, source: Tensor, *, after: Sequence[StreamMark]
    ) -> StreamMark:
        """Queue a copy from pinned memory."""
        return _queue(self._in, destination, source, after)

    def hold_back(self, mark: StreamMark) -> None:
        """Make the current stream wait for the mark."""
        assert isinstance(mark, torch.Event), "made by these streams"
        torch.accelerator.current_stream(self._device).wait_event(mark)


class _Reached:
    """A mark that has been reached."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


REACHED: StreamMark = _Reached()
"""A mark that has been reached."""


class NoStreams:
    """The CPU's streams: every copy is synchronous."""

    is_concurrent = False

    def allocate(self, nbytes: int) -> Tensor:
        """Return CPU memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def now(self) -> StreamMark:
        """Return a reached mark: everything has run."""
        return REACHED

    def copy_out(
        self, destination: Tensor, source: Tensor, *, after: Sequence[StreamMark]
    ) -> StreamMark:
        """Copy synchronously."""
        del after
        destination.copy_(source)
        return REACHED

    copy_in = copy_out

    def hold_back(self, mark: StreamMark) -> None:
        """Do nothing: every mark has been reached."""
        del mark


@functools.cache
def streams_of(device: torch.device) -> Streams:
    """Return the copy streams of a device, always the same object."""
    if device.type == "cpu":
        return NoStreams()
    return DeviceStreams(device)


def _queue(
    stream: torch.Stream,
    destination: Tensor,
    source: Tensor,
    after: Sequence[StreamMark],
) -> StreamMark:
    for mark in after:
        if mark is not REACHED:
            assert isinstance(mark, torch.Event), "made by these streams"
            stream.wait_event(mark)
    with stream:
        destination.copy_(source, non_blocking=True)
    return stream.record_event()


_BYTES = 1 << 26
_REPEATS = 3


def link_bytes_per_second(device: torch.device) -> float:
    """Return the bandwidth from pinned memory to a device; 0 if there is no link.

    Copies 64 MiB a few times. The other direction is assumed to be as fast.

    Examples:
        >>> link_bytes_per_second(torch.device("cpu"))
        0.0
    """
    if device.type != "cuda":
        return 0.0
    try:
        host = torch.empty(_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        there = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return 0.0
    start = torch.cuda.Event(enable_timing=True)
    stop = torch.cuda.Event(enable_timing=True)
    there.copy_(host, non_blocking=True)
    start.record()
    for _ in range(_REPEATS):
        there.copy_(host, non_blocking=True)
    stop.record()
    stop.synchronize()
    return _REPEATS * _BYTES / (start.elapsed_time(stop) / 1000)

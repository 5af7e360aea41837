"""The host tier: values move to pinned host memory while the device computes."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from recoup.backend.memory.pinned import BufferPool, memory_of
from recoup.backend.memory.streams import streams_of
from recoup.engine.tiers.account import ACCOUNTS
from recoup.engine.tiers.protocol import SMALLEST_BYTES, ExactTier, Stored, check_sizes
from recoup.engine.tiers.traffic import Parcel, Traffic

WINDOW_BYTES = 512 << 20
"""The default limit on device memory in flight to the host or back. A link of 55 GB/s
takes 10 ms for it, several times as long as a transformer block, so that neither waits
for the other between blocks."""


@dataclass(frozen=True)
class Host(ExactTier):
    """Keep values in host memory, exactly, and prefetch them in backward.

    Copies overlap with the computation, with one stream per direction, and use pinned
    buffers that are reused in the next step. A value's memory is free for reuse once
    its copy is done in stream order; the calling thread never waits. In backward the
    values are prefetched in reverse order.

    The peak falls by the bytes moved less `window_bytes`, which bounds the bytes in
    flight. If values are made faster than the link transfers them, the device waits for
    the link. Values still in the window when backward needs them are used directly.

    On the CPU it is a plain copy with the same statistics.

    Args:
        window_bytes: Device memory that may be in flight in both directions.
        smallest_bytes: Storages of fewer bytes stay on the device.

    Raises:
        UsageError: A number of bytes is negative.

    Examples:
        >>> import torch
        >>> from recoup import CheckpointScope
        >>> x = torch.linspace(-1, 1, 20000, requires_grad=True)
        >>> with CheckpointScope("block", store=Host()):
        ...     y = x.exp().sin()
        >>> y.sum().backward()
        >>> torch.equal(x.grad, (x.exp().cos() * x.exp()).detach())
        True
    """

    window_bytes: int = WINDOW_BYTES
    smallest_bytes: int = SMALLEST_BYTES

    def __post_init__(self) -> None:
        check_sizes(window_bytes=self.window_bytes, smallest_bytes=self.smallest_bytes)

    def takes(self, nbytes: int) -> bool:
        """Return whether a storage is large enough to be moved."""
        return nbytes >= self.smallest_bytes

    def put(self, storage: Tensor, guard: Tensor | None = None) -> Stored:
        """Start the copy to the host."""
        return OnHost(storage, storage if guard is None else guard, self.window_bytes)


class OnHost(Stored):
    """One storage on the host, or in flight to it or back."""

    _parcel: Parcel | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the storage."""
        return self._nbytes

    def wait(self) -> memoryview:
        """Wait until the copy to the host is done; return the bytes there."""
        parcel = self._parcel
        assert parcel is not None, "not dropped"
        assert parcel.buffer is not None, "on the host"
        assert parcel.copied is not None, "in flight"
        parcel.copied.synchronize()
        return memory_of(parcel.buffer.memory[: parcel.nbytes])

    def __init__(self, storage: Tensor, guard: Tensor, window_bytes: int) -> None:
        self._traffic = traffic_of(storage.device)
        self._dtype = storage.dtype
        self._nbytes = storage.nbytes
        self._parcel = self._traffic.send(
            storage.view(torch.uint8), guard, window_bytes=window_bytes
        )
        ACCOUNTS.host.put(self._parcel.nbytes)

    def get(self) -> Tensor:
        """Return the storage; the stream waits for its copy, this thread does not."""
        parcel = self._parcel
        assert parcel is not None, "not dropped"
        ACCOUNTS.host.got(parcel.nbytes if parcel.source is None else 0)
        return self._traffic.bring(parcel).view(self._dtype)

    def prefetch(self) -> None:
        """Start the copy back, if the window has room for it."""
        if self._parcel is not None:
            self._traffic.start(self._parcel)

    def settle(self) -> None:
        """Make later work of the device wait for the copy."""
        if self._parcel is not None:
            self._traffic.settle(self._parcel)

    def drop(self) -> None:
        """Return the buffer to the pool."""
        parcel, self._parcel = self._parcel, None
        if parcel is not None:
            ACCOUNTS.host.dropped(parcel.nbytes)
            self._traffic.drop(parcel)

    def __del__(self) -> None:
        self.drop()


@functools.cache
def pool_of(device_type: str) -> BufferPool:
    """Return the pool of host buffers for devices of a type."""
    return BufferPool(pinned=device_type != "cpu")


@functools.cache
def traffic_of(device: torch.device) -> Traffic:
    """Return the traffic between a device and the host, always the same object."""
    return Traffic(streams_of(device), pool_of(device.type))

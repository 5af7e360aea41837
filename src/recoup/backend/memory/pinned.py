"""A pool of pinned host buffers for device copies, reused from step to step."""

import ctypes
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass

import torch
from torch import Tensor

from recoup.backend.memory.streams import REACHED, StreamMark

_STEPS = 8
"""Buffer sizes between two powers of two: at most one part in eight is unused."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Host memory, and the point in its stream from which it may be written.

    Attributes:
        memory: The bytes.
        ready: The mark behind the last copy that read or wrote them.
    """

    memory: Tensor
    ready: StreamMark = REACHED


class BufferPool:
    """A pool of host buffers, by size.

    A returned buffer may be reused before the copy that last used it has run: the next
    user queues its own copy behind `ready`. New memory is allocated only if no buffer
    of that size is free; before that, free buffers of other sizes are dropped if the
    total would exceed twice the most bytes in use at once so far. So the total is
    bounded even if shapes change from step to step.

    Args:
        pinned: Whether to allocate page-locked memory.

    Examples:
        >>> pool = BufferPool(pinned=False)
        >>> first = pool.take(1000)
        >>> pool.give(first)
        >>> pool.take(1000).memory.data_ptr() == first.memory.data_ptr()
        True
        >>> pool.total_bytes
        1024
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: OrderedDict[int, deque[Buffer]] = OrderedDict()
        # Finalizers return buffers and must not wait for a lock that their own thread
        # may hold: they append here, and `take` moves them to `_free`.
        self._returned: deque[Buffer] = deque()
        self._lock = threading.Lock()
        self._in_use_bytes = 0
        self._free_bytes = 0
        self._busiest_bytes = 0

    @property
    def total_bytes(self) -> int:
        """The bytes of all buffers, in use or free."""
        return self._in_use_bytes + self._free_bytes

    @property
    def in_use_bytes(self) -> int:
        """The bytes of the buffers in use."""
        with self._lock:
            self._sort_in()
            return self._in_use_bytes

    def take(self, nbytes: int) -> Buffer:
        """Return a buffer of at least `nbytes`."""
        size = rounded(nbytes)
        with self._lock:
            self._sort_in()
            waiting = self._free.get(size)
            self._in_use_bytes += size
            if waiting:
                self._free_bytes -= size
                self._free.move_to_end(size)
                # The one returned first is the likeliest to be ready.
                return waiting.popleft()
            self._busiest_bytes = max(self._busiest_bytes, self._in_use_bytes)
            self._let_go()
        memory = torch.empty(
            size, dtype=torch.uint8, device="cpu", pin_memory=self._pinned
        )
        return Buffer(memory)

    def give(self, buffer: Buffer) -> None:
        """Return a buffer to the pool; finalizers may call this at any point."""
        self._returned.append(buffer)

    def clear(self) -> None:
        """Free the memory of all buffers that are not in use."""
        with self._lock:
            self._sort_in()
            self._free.clear()
            self._free_bytes = 0
            self._busiest_bytes = self._in_use_bytes

    def _sort_in(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            size = buffer.memory.nbytes
            self._free.setdefault(size, deque()).append(buffer)
            self._in_use_bytes -= size
            self._free_bytes += size

    def _let_go(self) -> None:
        """Drop free buffers, least recently used sizes first."""
        while self._free and self.total_bytes > 2 * self._busiest_bytes:
            size, waiting = next(iter(self._free.items()))
            if waiting:
                waiting.popleft()
                self._free_bytes -= size
            if not waiting:
                del self._free[size]


def rounded(nbytes: int) -> int:
    """Return the buffer size for `nbytes`.

    Examples:
        >>> rounded(1), rounded(1024), rounded(1025), rounded(3_000_000)
        (512, 1024, 1536, 3145728)
    """
    step = max(512, (1 << (max(nbytes, 1) - 1).bit_length()) // 2 // _STEPS)
    return -(-max(nbytes, 1) // step) * step


def memory_of(tensor: Tensor) -> memoryview:
    """Return a writable view of a contiguous CPU tensor's bytes.

    The view does not keep the tensor alive.

    Examples:
        >>> tensor = torch.zeros(3, dtype=torch.uint8)
        >>> memory_of(tensor)[1] = 7
        >>> tensor
        tensor([0, 7, 0], dtype=torch.uint8)
    """
    if not tensor.nbytes:
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")

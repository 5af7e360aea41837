"""The profiler: how many bytes regions save against keeping everything."""

import threading
from types import TracebackType
from typing import Self

from torch import Tensor

from recoup.backend.graph import pop_hooks, push_hooks
from recoup.backend.storages import (
    free_weak_reference,
    has_storage,
    take_weak_reference,
)
from recoup.core.errors import UsageError
from recoup.engine.observers import subscribe, unsubscribe
from recoup.engine.region import Region
from recoup.engine.values import Hold


class CheckpointProfiler:
    """Measures what autograd would have kept and what is kept instead.

    Counts unique storages, so that a view costs nothing. It watches what is saved
    inside regions on all threads, and what is saved outside of them on the thread that
    started it. Starting sets the counts back.

    Examples:
        >>> import torch
        >>> from recoup import CheckpointScope
        >>> x = torch.ones(256, requires_grad=True)
        >>> with CheckpointProfiler() as profiler, CheckpointScope("block"):
        ...     y = x.exp().sin().tanh()
        >>> profiler.checkpoint_count()
        1
        >>> profiler.plain_bytes(), profiler.kept_bytes()  # exp and tanh; x
        (2048, 1024)
        >>> profiler.memory_saved()
        1024
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._would = _Storages()
        self._kept = _Storages()
        self._random: dict[int, int] = {}
        self._count = 0
        self._thread: int | None = None

    def start_tracking(self) -> None:
        """Set the counts back and start.

        Raises:
            UsageError: It is tracking already.
        """
        if self._thread is not None:
            raise UsageError("this profiler is tracking already: stop it first.")
        self.reset_statistics()
        self._thread = threading.get_ident()
        subscribe(self)
        push_hooks(self._pack, self._unpack)

    def stop_tracking(self) -> None:
        """Stop; the counts stay readable. Does nothing if it is not tracking.

        Raises:
            UsageError: It was started on another thread.
        """
        if self._thread is None:
            return
        if self._thread != threading.get_ident():
            raise UsageError("stop the profiler on the thread that started it.")
        self._thread = None
        pop_hooks()
        unsubscribe(self)

    def reset_statistics(self) -> None:
        """Set all counts back to zero."""
        with self._lock:
            self._would = _Storages()
            self._kept = _Storages()
            self._random = {}
            self._count = 0

    def memory_saved(self) -> int:
        """Return the bytes autograd would have kept minus the bytes kept."""
        return self.plain_bytes() - self.kept_bytes()

    def plain_bytes(self) -> int:
        """Return the bytes that autograd would have kept without regions."""
        with self._lock:
            return self._would.total_bytes

    def kept_bytes(self) -> int:
        """Return the bytes that are kept: by regions, and saved outside of them."""
        with self._lock:
            return self._kept.total_bytes + sum(self._random.values())

    def checkpoint_count(self) -> int:
        """Return how many regions have run."""
        with self._lock:
            return self._count

    def began(self, region: Region) -> None:
        """Take note of a region that is about to record."""
        if self._would_have not in region.listeners:
            region.listeners = (*region.listeners, self._would_have)

    def ended(self, region: Region) -> None:
        """Take note of what a region holds after its forward."""
        with self._lock:
            self._count += 1
            self._random[id(region)] = region.random_bytes()
            for value in region.held():
                if value.hold is not None and value.hold.tensor is not None:
                    self._kept.add(value.hold.tensor)

    def __enter__(self) -> Self:
        self.start_tracking()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop_tracking()

    def _would_have(self, tensor: Tensor) -> None:
        with self._lock:
            self._would.add(tensor)

    def _pack(self, tensor: Tensor) -> Hold:
        with self._lock:
            self._would.add(tensor)
            self._kept.add(tensor)
        return Hold(tensor)

    _pack.is_transparent = True  # type: ignore[attr-defined]

    def _unpack(self, hold: Hold) -> Tensor:
        return hold.fetch("a backward operator")


class _Storages:
    """Unique storages and their bytes; keeps identities, not memory."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        self.total_bytes = 0

    def add(self, tensor: Tensor) -> None:
        if not has_storage(tensor):
            return
        address = take_weak_reference(tensor)
        if address in self._bytes:
            free_weak_reference(address)
            return
        nbytes = tensor.untyped_storage().nbytes()
        self._bytes[address] = nbytes
        self.total_bytes += nbytes

    def __del__(self) -> None:
        for address in self._bytes:
            free_weak_reference(address)

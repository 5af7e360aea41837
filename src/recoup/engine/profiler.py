"""The profiler: how many bytes regions save against keeping everything."""

import threading
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from recoup.backend.graph import Pack, Unpack, ambient_hooks, pop_hooks, push_hooks
from recoup.backend.ledger import StorageLedger
from recoup.backend.storages import alias
from recoup.core.errors import UsageError
from recoup.engine.active import open_regions
from recoup.engine.observers import (
    Watched,
    is_transparent,
    subscribe,
    unsubscribe,
)
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
        self._would = StorageLedger()
        self._kept = StorageLedger()
        self._random_bytes = 0
        self._count = 0
        self._thread: int | None = None
        self._around: tuple[Pack, Unpack] | None = None

    def start_tracking(self) -> None:
        """Set the counts back and start.

        Raises:
            UsageError: It is tracking already, or a scope is open on this thread.
        """
        if self._thread is not None:
            raise UsageError("this profiler is tracking already: stop it first.")
        if open_regions():
            raise UsageError(
                "a profiler is started inside a checkpoint scope, which saves for "
                "itself. Start it before the scope is entered."
            )
        self.reset_statistics()
        self._thread = threading.get_ident()
        self._around = ambient_hooks()
        subscribe(self)
        push_hooks(self._pack, self._unpack)

    def stop_tracking(self) -> None:
        """Stop; the counts stay readable. Does nothing if it is not tracking.

        Raises:
            UsageError: It was started on another thread, or something that was
                entered since then has not been left.
        """
        if self._thread is None:
            return
        hooks = ambient_hooks()
        mine = hooks is not None and getattr(hooks[0], "__self__", None) is self
        if self._thread != threading.get_ident() or not mine:
            raise UsageError(
                "stop a profiler on the thread that started it, after every scope, "
                "profiler and saved-tensor hook that was entered since has been left."
            )
        self._thread = None
        self._around = None
        pop_hooks()
        unsubscribe(self)

    def reset_statistics(self) -> None:
        """Set all counts back to zero."""
        with self._lock:
            self._would = StorageLedger()
            self._kept = StorageLedger()
            self._random_bytes = 0
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
            return self._kept.total_bytes + self._random_bytes

    def checkpoint_count(self) -> int:
        """Return how many regions have run."""
        with self._lock:
            return self._count

    def began(self, region: Watched) -> None:
        """Take note of a region that is about to run."""
        region.listeners = (*region.listeners, self._would_have)

    def ended(self, region: Watched) -> None:
        """Take note of what a region holds after its forward."""
        with self._lock:
            self._count += 1
            self._random_bytes += region.random_bytes()
            for hold in region.holds():
                if hold.tensor is not None:
                    self._kept.add_all(hold.tensor)

    def note(self, tensor: Tensor) -> None:
        """Take note of a tensor saved outside of regions."""
        with self._lock:
            self._would.add_all(tensor)
            self._kept.add_all(tensor)
        around = None if self._around is None else self._around[0]
        if around is not None and is_transparent(around):
            getattr(around, "__self__").note(tensor)  # noqa: B009 (a bound method)

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
            self._would.add_all(tensor)

    def _pack(self, tensor: Tensor) -> Any:
        self.note(tensor)
        around = self._around
        if around is None or is_transparent(around[0]):
            return Hold(alias(tensor))
        pack, unpack = around
        return pack(tensor), unpack

    _pack.is_transparent = True  # pyright: ignore[reportFunctionMemberAccess]

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Hold):
            return packed.fetch("a backward operator")
        kept, unpack = packed
        return unpack(kept)

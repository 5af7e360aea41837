"""The profiler: the bytes that regions save compared with plain autograd."""

import itertools
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar
from weakref import ref

import torch
from torch import Tensor

from recoup.backend.autograd.saved_tensors import (
    Pack,
    Unpack,
    ambient_hooks,
    is_parameter,
    pop_hooks,
    push_hooks,
    saves_its_result,
)
from recoup.backend.compiler.recognition import leave_uncompiled
from recoup.backend.memory.ledger import StorageLedger, storages_in
from recoup.backend.memory.storages import alias
from recoup.core.units import print_bytes
from recoup.engine.lifetime.values import Hold
from recoup.engine.recording.active import open_regions
from recoup.engine.recording.observers import (
    Watched,
    is_transparent,
    subscribe,
    unsubscribe,
)
from recoup.engine.scopes.statistics import Accounts, StatisticsTable
from recoup.errors import UsageError

_ELSEWHERE = -1
"""The number of regions on other threads, which may still use their tensors."""


Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


class _Profilers(threading.local):
    """The active profilers of this thread.

    Attributes:
        profilers: The number of profilers tracking on it.
    """

    profilers = 0


_THREAD = _Profilers()


class _OnClassToo(Generic[Parameters, Returned]):
    """A method that, called on the class, runs on one shared profiler."""

    def __init__(
        self, method: Callable[Concatenate[Any, Parameters], Returned]
    ) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(
        self, profiler: "CheckpointProfiler | None", kind: type
    ) -> Callable[Parameters, Returned]:
        return MethodType(self._method, _SHARED if profiler is None else profiler)


@dataclass(frozen=True, slots=True)
class HeldOutside:
    """A tensor that a region freed but that is still referenced elsewhere.

    Attributes:
        region: The name of the region that it was saved in.
        shape: Its shape.
        dtype: Its dtype.
        bytes: The bytes of its storage.
    """

    region: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


class CheckpointProfiler:
    """Measures the bytes that autograd would keep, and those that are kept instead.

    Counts unique storages, so views are free. It tracks tensors saved on the thread
    that started it, and in regions on threads without a profiler. Starting resets the
    counts.

    Called on the class itself, the methods run on one profiler shared by the process.

    Recomputing a tensor saves no memory while something still refers to the original:
    `held_outside` lists such tensors, and stopping warns of them.

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
        self._numbers = itertools.count()
        self._running: dict[int, int] = {}
        self._reset()
        self._thread: int | None = None
        self._around: tuple[Pack, Unpack] | None = None

    @_OnClassToo
    def start_tracking(self) -> None:
        """Reset the counts and start tracking.

        Raises:
            UsageError: It is tracking already, or a scope is open on this thread.
        """
        if self._thread is not None:
            raise UsageError(
                "expected a profiler that is not tracking, got one that is; stop it "
                "first."
            )
        if open_regions():
            raise UsageError(
                "expected the start of a profiler outside checkpoint scopes, got it "
                "inside one; start it before the scope is entered."
            )
        self.reset_statistics()
        self._thread = threading.get_ident()
        self._around = ambient_hooks()
        subscribe(self)
        _THREAD.profilers += 1
        push_hooks(self._pack, self._unpack)

    @_OnClassToo
    def stop_tracking(self) -> None:
        """Stop tracking; the counts stay readable. Does nothing if not tracking.

        Warns if tensors that regions freed are still referenced from outside.

        Raises:
            UsageError: It was started on another thread, or a scope or hooks entered
                since then are still active.
        """
        if self._thread is not None:
            self._stop()
            self._warn()

    def _stop(self) -> None:
        if self._thread is None:
            return
        hooks = ambient_hooks()
        mine = hooks is not None and getattr(hooks[0], "__self__", None) is self
        if self._thread != threading.get_ident() or not mine:
            raise UsageError(
                "expected the end of a profiler on the thread that started it, outside "
                "every scope, profiler and saved-tensor hook entered since, got it "
                "elsewhere; stop the profiler there."
            )
        self._thread = None
        self._around = None
        pop_hooks()
        _THREAD.profilers -= 1
        unsubscribe(self)

    @_OnClassToo
    def reset_statistics(self) -> None:
        """Reset all counts to zero."""
        self._reset()

    def _reset(self) -> None:
        with self._lock:
            self._would = StorageLedger()
            self._kept = StorageLedger()
            self._would_parameters = StorageLedger()
            self._kept_parameters = StorageLedger()
            self._random_bytes = 0
            self._count = 0
            self._accounts = Accounts()
            self._saved: dict[int, _Saved] = {}
            self._just_ended = {_ELSEWHERE}

    @_OnClassToo
    def memory_saved(self) -> int:
        """Return the activations autograd would have kept minus those kept, in bytes.

        Excludes parameters, which are always in memory: one that only a replay needs,
        such as an embedding's weight, costs nothing.
        """
        with self._lock:
            plain = self._would.total_bytes - self._would_parameters.total_bytes
            kept = self._kept.total_bytes - self._kept_parameters.total_bytes
            return plain - kept - self._random_bytes

    @_OnClassToo
    def parameter_bytes(self) -> int:
        """Return the bytes of parameters among the kept tensors."""
        with self._lock:
            return self._kept_parameters.total_bytes

    @_OnClassToo
    def plain_bytes(self) -> int:
        """Return the bytes that autograd would have kept without regions."""
        with self._lock:
            return self._would.total_bytes

    @_OnClassToo
    def kept_bytes(self) -> int:
        """Return the bytes kept by regions and saved outside of them."""
        with self._lock:
            return self._kept.total_bytes + self._random_bytes

    @property
    def statistics(self) -> StatisticsTable:
        """The statistics of regions by name, including backward; prints as a table.

        A region that ran while the profiler was tracking is counted to its end.
        """
        return self._accounts.table()

    @_OnClassToo
    def checkpoint_count(self) -> int:
        """Return the number of regions that have run."""
        with self._lock:
            return self._count

    @_OnClassToo
    def held_outside(self) -> tuple[HeldOutside, ...]:
        """Return freed tensors that are still referenced, largest first.

        Variables, lists of activations, attributes or hooks may hold them. Results of
        regions are omitted unless the region itself has used them.
        """
        return tuple(saved.held for saved in self._outside())

    def began(self, region: Watched) -> None:
        """Track a region that is about to run."""
        if not self._counts_here():
            return
        number = _ELSEWHERE
        if threading.get_ident() == self._thread:
            number = next(self._numbers)
            if not self._running:
                self._just_ended = {_ELSEWHERE}
            self._running[id(region)] = number
        listener = partial(self._would_have, region.name, number)
        region.listeners = (*region.listeners, listener)
        self._accounts.follow(region)

    def ended(self, region: Watched) -> None:
        """Count what a region holds after its forward."""
        if not self._counts_here():
            return  # same as in `began`: profilers cannot change inside a region
        with self._lock:
            self._count += 1
            self._just_ended.add(self._running.pop(id(region), _ELSEWHERE))
            self._random_bytes += region.random_bytes()
            for hold in region.holds():
                if hold.tensor is not None:
                    self._kept.add_all(hold.tensor)
                    if hold.is_parameter:
                        self._kept_parameters.add_all(hold.tensor)

    def _counts_here(self) -> bool:
        """Return whether regions on this thread are counted by this profiler."""
        return threading.get_ident() == self._thread or not _THREAD.profilers

    def note(self, tensor: Tensor) -> None:
        """Record a tensor saved outside of regions."""
        with self._lock:
            self._would.add_all(tensor)
            self._kept.add_all(tensor)
            if is_parameter(tensor):
                self._would_parameters.add_all(tensor)
                self._kept_parameters.add_all(tensor)
        around = None if self._around is None else self._around[0]
        owner = getattr(around, "__self__", None)
        if isinstance(owner, CheckpointProfiler):
            owner.note(tensor)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy: only the counts by region."""
        return {"_accounts": self._accounts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()
        self.__dict__.update(state)

    def __enter__(self) -> Self:
        self.start_tracking()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._stop()
        if kind is None:
            self._warn()

    def _would_have(self, region: str, number: int, tensor: Tensor) -> None:
        with self._lock:
            if is_parameter(tensor):
                self._would_parameters.add_all(tensor)
            for storage in storages_in(tensor):
                if self._would.add(storage):
                    shape, size = tuple(tensor.shape), storage.nbytes()
                    held = HeldOutside(region, shape, tensor.dtype, size)
                    forget = partial(_forget, self._saved, id(storage))
                    saved = _Saved(ref(storage, forget), number, held)
                    saved.is_used = not saves_its_result(tensor.grad_fn)
                    self._saved[id(storage)] = saved
                elif id(storage) in self._saved:
                    self._saved[id(storage)].is_used = True

    def _outside(self) -> list["_Saved"]:
        with self._lock:
            found = [
                saved
                for saved in list(self._saved.values())
                if saved.is_used
                and (storage := saved.storage()) is not None
                and not self._kept.refresh(storage)
            ]
        return sorted(found, key=lambda saved: -saved.held.bytes)

    def _warn(self) -> None:
        # Regions that ended last have just returned results, which are in use.
        held = [
            saved.held
            for saved in self._outside()
            if saved.region not in self._just_ended
        ]
        if held:
            total = print_bytes(sum(each.bytes for each in held))
            first = held[0]
            warnings.warn(
                f"{len(held)} tensors ({total}) that checkpointed regions freed "
                "are still referenced from outside, so recomputing them saves no "
                f"memory; the largest is {first.dtype} {list(first.shape)} of region "
                f"{first.region!r}. Drop what refers to them: lists of activations, "
                "attributes, hooks. held_outside() names all.",
                UserWarning,
                stacklevel=3,
            )

    @leave_uncompiled
    def _pack(self, tensor: Tensor) -> Any:
        self.note(tensor)
        around = self._around
        if around is None or is_transparent(around[0]):
            return Hold(alias(tensor))
        pack, unpack = around
        return pack(tensor), unpack

    _pack.is_transparent = True  # pyright: ignore[reportFunctionMemberAccess]

    @leave_uncompiled
    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Hold):
            return packed.fetch("a backward operator")
        kept, unpack = packed
        return unpack(kept)


@dataclass(slots=True)
class _Saved:
    """A storage that autograd would have kept, and the region it was saved in.

    If only its producer saved it (`is_used` is False), it may be a region's result.
    """

    storage: ref[torch.UntypedStorage]
    region: int
    held: HeldOutside
    is_used: bool = True


def _forget(saved: dict[int, _Saved], number: int, _: object) -> None:
    """Drop the entry of a dead storage."""
    saved.pop(number, None)


_SHARED = CheckpointProfiler()
"""The profiler for methods called on the class."""

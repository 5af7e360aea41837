"""The profiler: how many bytes regions save against keeping everything."""

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
"""The number of regions on other threads, which may be at work with their tensors."""


Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


class _Thread(threading.local):
    """The active profilers of this thread.

    Attributes:
        profilers: How many profilers were started on it and not stopped.
    """

    profilers = 0


_THREAD = _Thread()


class _OnClassToo(Generic[Parameters, Returned]):
    """A method that the class has too, where it is that of one shared profiler."""

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
        dtype: Its type.
        bytes: The bytes of its storage.
    """

    region: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


class CheckpointProfiler:
    """Measures the bytes that autograd would keep, and those that are kept instead.

    Counts unique storages, so that a view costs nothing. It watches what is saved on
    the thread that started it, and inside regions on threads that have no profiler of
    their own. Starting sets the counts back.

    Called on the class itself, the methods are those of one profiler that the whole
    process shares.

    What a region recomputes saves nothing while something still refers to the first
    result: `held_outside` names such tensors, and stopping warns of them.

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
        _THREAD.profilers += 1
        push_hooks(self._pack, self._unpack)

    @_OnClassToo
    def stop_tracking(self) -> None:
        """Stop; the counts stay readable. Does nothing if it is not tracking.

        Warns if tensors that regions freed are still referenced from outside.

        Raises:
            UsageError: It was started on another thread, or something that was
                entered since then has not been left.
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
                "stop a profiler on the thread that started it, after every scope, "
                "profiler and saved-tensor hook that was entered since has been left."
            )
        self._thread = None
        self._around = None
        pop_hooks()
        _THREAD.profilers -= 1
        unsubscribe(self)

    @_OnClassToo
    def reset_statistics(self) -> None:
        """Set all counts back to zero."""
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

        Parameters are in memory in any case: one that only a replay needs, such as the
        weight of an embedding, is no loss.
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
        """Return the bytes that are kept: by regions, and saved outside of them."""
        with self._lock:
            return self._kept.total_bytes + self._random_bytes

    @property
    def statistics(self) -> StatisticsTable:
        """The statistics of regions by name, backward included; prints as a table.

        A region that ran while the profiler was tracking counts to its end.
        """
        return self._accounts.table()

    @_OnClassToo
    def checkpoint_count(self) -> int:
        """Return how many regions have run."""
        with self._lock:
            return self._count

    @_OnClassToo
    def held_outside(self) -> tuple[HeldOutside, ...]:
        """Return freed tensors that are still referenced, the largest first.

        It is held by variables, lists of activations, attributes, hooks. Results of
        regions are left out, as far as nothing inside the region has used them.
        """
        return tuple(saved.held for saved in self._outside())

    def began(self, region: Watched) -> None:
        """Watch a region that is about to run."""
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
            return  # as when it began: none is started or stopped inside a region
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
        """Return what a copy has: nothing but the counts by region."""
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
        # What ended last has just returned its results, which are meant to be there.
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

    What was saved by its own operator alone may be a result of the region.
    """

    storage: ref[torch.UntypedStorage]
    region: int
    held: HeldOutside
    is_used: bool = True


def _forget(saved: dict[int, _Saved], number: int, _: object) -> None:
    """Drop the entry of a storage that is gone."""
    saved.pop(number, None)


_SHARED = CheckpointProfiler()
"""The profiler of those who call methods on the class."""

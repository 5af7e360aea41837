"""Meters of live and peak bytes: per storage, per allocator, or between marks."""

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn
from torch._C import _profiler as profiler
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from recoup.backend.memory.ledger import StorageLedger, rounded_up, storages_in
from recoup.backend.operators.dispatch import OperatorMode


class MemoryMeter(Protocol):
    """The interface of all memory meters."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: Any) -> None: ...

    @property
    def live_bytes(self) -> int:
        """Bytes alive now."""
        ...

    @property
    def peak_bytes(self) -> int:
        """The largest `live_bytes` since entry or the last `reset_peak`."""
        ...

    def reset_peak(self) -> None:
        """Restart the peak at the bytes that are alive now."""
        ...

    def track(self, *things: Tensor | nn.Module) -> None:
        """Count existing tensors, unless the meter counts them anyway."""
        ...

    def counted_bytes(self, nbytes: int) -> int:
        """Return the size counted for a storage of `nbytes`."""
        ...


def device_meter(device: torch.device | str) -> MemoryMeter:
    """Choose the meter that is exact on `device`.

    An accelerator has an allocator that counts everything torch holds there; on
    other devices a `StorageMeter` counts tensors made inside it or given to `track`.

    Examples:
        >>> with device_meter("cpu") as meter:
        ...     ones = torch.ones(1000)
        >>> meter.peak_bytes
        4000
    """
    device = torch.device(device)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and device.type == accelerator.type:
        return AllocatorMeter(device)
    return StorageMeter(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is an out-of-memory error, on any device.

    Examples:
        >>> is_out_of_memory(torch.OutOfMemoryError()), is_out_of_memory(KeyError())
        (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


BLOCK_BYTES = 512
"""Torch's caching allocators round every request up to a multiple of this."""


class AllocatorMeter:
    """Read live and peak bytes from the allocator of an accelerator.

    The figures are those of the whole process on that device. A storage counts as its
    block: rounded up to 512 bytes, and above 1 MiB up to 1 MiB more, because a free
    block with a smaller remainder is not split. Which free block is used depends on
    earlier allocations. Entering resets the process-wide peak; leaving freezes
    `peak_bytes`.

    Examples:
        >>> meter = AllocatorMeter("cuda:0")  # then: with meter: step()
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._final_peak_bytes: int | None = None

    def __enter__(self) -> Self:
        self._final_peak_bytes = None
        self.reset_peak()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._final_peak_bytes = self.peak_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of all tensors on the device now."""
        return _allocated(self._device, "current")

    @property
    def peak_bytes(self) -> int:
        """The allocator's peak, frozen when the meter is left."""
        if self._final_peak_bytes is not None:
            return self._final_peak_bytes
        return _allocated(self._device, "peak")

    def reset_peak(self) -> None:
        """Restart the peak at the bytes that are alive now."""
        torch.accelerator.reset_peak_memory_stats(self._device)

    def track(self, *things: Tensor | nn.Module) -> None:
        """Do nothing: the allocator also counts what existed before."""

    def counted_bytes(self, nbytes: int) -> int:
        """Return the size of the smallest block for `nbytes`."""
        return rounded_up(nbytes, BLOCK_BYTES)


def _allocated(device: torch.device, which: str) -> int:
    """Return the current or the peak bytes of an accelerator's allocator."""
    if device.type == "cuda":
        # Tracing reads the meter at every operator, and torch's public function sorts
        # some hundred statistics per call.
        index = torch.cuda.current_device() if device.index is None else device.index
        statistics: Any = torch._C._cuda_memoryStats(index)
        return statistics["allocated_bytes"]["all"][which]
    if which == "peak":
        return torch.accelerator.max_memory_allocated(device)
    return torch.accelerator.memory_allocated(device)


class StorageMeter(OperatorMode):
    """Count live and peak bytes by unique storage, exactly.

    A storage counts from the moment an operator returns it until the moment it dies,
    once, however many tensors and autograd nodes share it. What existed before
    entry counts only if given to `track`. Resizes count at once. Frees are noticed
    after leaving too, so `live_bytes` stays correct for counted storages.

    Not counted: a kernel's workspace, and storages made outside the dispatcher (states
    of random generators, `torch.UntypedStorage` before it becomes a tensor). Costs some
    ten microseconds per operator, keeps no tensor alive, and nests with any other mode.
    Like every dispatch mode it is active on the thread that entered it, and on
    autograd's threads in the backward passes started there.

    Args:
        device: Device whose storages are counted; by default all but the meta device.
        block_bytes: Round every storage up to a multiple, as allocators do.

    Examples:
        >>> with StorageMeter() as meter:
        ...     total = (torch.ones(1000) + 1).sum()
        >>> meter.live_bytes, meter.peak_bytes
        (4, 8000)
    """

    def __init__(
        self, device: torch.device | str | None = None, *, block_bytes: int = 1
    ) -> None:
        super().__init__()
        self._device = None if device is None else torch.device(device)
        self._ledger = StorageLedger(block_bytes=block_bytes)

    def __enter__(self) -> Self:
        self._ledger.watch_resizes()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._ledger.unwatch_resizes()

    @property
    def live_bytes(self) -> int:
        """Bytes of the counted storages that are alive now."""
        return self._ledger.live_bytes

    @property
    def peak_bytes(self) -> int:
        """The largest `live_bytes` so far, or since `reset_peak`."""
        return self._ledger.peak_bytes

    def reset_peak(self) -> None:
        """Restart the peak at the bytes that are alive now."""
        self._ledger.reset_peak()

    def track(self, *things: Tensor | nn.Module) -> None:
        """Count tensors, or modules with parameters, gradients and buffers.

        Examples:
            >>> linear, meter = nn.Linear(10, 5), StorageMeter()
            >>> meter.track(linear)
            >>> meter.live_bytes
            220
        """
        for storage in storages_in(things):
            self._add(storage)

    def counted_bytes(self, nbytes: int) -> int:
        """Return the size counted for a storage of `nbytes`."""
        return self._ledger.counted_bytes(nbytes)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, then count what it returned."""
        kwargs = kwargs or {}
        if types and any(map(is_traceable_wrapper_subclass_type, types)):
            # The subclass then runs its inner operators, which are counted here.
            return NotImplemented
        if torch.is_inference_mode_enabled() and isinstance(
            func, torch._ops.OpOverload
        ):
            # Without autograd a composite operator is not decomposed before it arrives.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        self._account(func, (args, kwargs), result)
        return result

    def _account(self, func: Any, arguments: Any, result: Any) -> None:
        # `torch.tensor` fills a tensor below the dispatcher, then calls `lift_fresh`.
        given = set[int]() if func is torch.ops.aten.lift_fresh.default else None
        for storage in storages_in(result):
            if self._ledger.refresh(storage):
                continue
            if given is None:
                given = {id(storage) for storage in storages_in(arguments)}
            # A view of an uncounted, earlier storage allocates nothing.
            if id(storage) not in given:
                self._add(storage)
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            for storage in storages_in(arguments):
                self._ledger.refresh(storage)

    def _add(self, storage: torch.UntypedStorage) -> None:
        if _counts(storage.device, self._device):
            self._ledger.add(storage)


def _counts(actual: torch.device, wanted: torch.device | None) -> bool:
    if wanted is None:
        return actual.type != "meta"  # meta tensors take no memory
    return actual.type == wanted.type and wanted.index in (None, actual.index)


_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 (no stub)
_MARK = "recoup mark "


class Interval(NamedTuple):
    """The memory between two marks.

    Attributes:
        mark: The mark at its start; None for the first.
        live_bytes: Bytes in use at its start.
        peak_bytes: The most bytes in use in it.
    """

    mark: Hashable
    live_bytes: int
    peak_bytes: int


def interval_meter(device: torch.device) -> "IntervalMeter":
    """Return an interval meter for a device; on the CPU it starts from zero."""
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
    """Reads allocations from torch's legacy profiler, with all else switched off."""

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
        # Each thread has its own list. All allocations are in the first, because
        # autograd runs CPU backward in the calling thread.
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

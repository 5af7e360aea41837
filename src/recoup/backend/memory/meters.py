"""Meters of live and peak bytes: by storage, by allocator, or between marks."""

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
        """Start a new peak at what is alive now."""
        ...

    def track(self, *things: Tensor | nn.Module) -> None:
        """Count what existed before, where the meter would not know of it."""
        ...

    def counted_bytes(self, nbytes: int) -> int:
        """Return what a storage of so many bytes counts."""
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
    """Return whether an error says that memory ran out, on any device.

    Examples:
        >>> is_out_of_memory(torch.OutOfMemoryError()), is_out_of_memory(KeyError())
        (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


BLOCK_BYTES = 512
"""Torch's caching allocators give memory in multiples of it."""


class AllocatorMeter:
    """Read live and peak bytes from the allocator of an accelerator.

    The figures are those of the whole process on that device. What is counted of a
    storage is its block: rounded up to 512 bytes, and if it is larger than 1 MiB up
    to 1 MiB more, because a free block that leaves less than that over is given away
    whole. Which free block is found depends on what ran before. Entering starts a new
    peak, which is a process-wide setting; after leaving, `peak_bytes` stays what it was
    at the end.

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
        """Start a new peak at what is alive now."""
        torch.accelerator.reset_peak_memory_stats(self._device)

    def track(self, *things: Tensor | nn.Module) -> None:
        """Do nothing: the allocator counts what existed before as well."""

    def counted_bytes(self, nbytes: int) -> int:
        """Return the size of the smallest block for so many bytes."""
        return rounded_up(nbytes, BLOCK_BYTES)


def _allocated(device: torch.device, which: str) -> int:
    """Return the current or the peak bytes of an accelerator's allocator."""
    if device.type == "cuda":
        # A meter is read at every operator of a traced step, and torch's own function
        # sorts some hundred statistics for each of its figures.
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
    after leaving too, so `live_bytes` stays right for what was counted.

    Not seen: memory that a kernel uses inside one operator, and storages that are
    made outside the dispatcher (states of random generators, `torch.UntypedStorage`
    before it becomes a tensor). Costs some ten microseconds an operator, keeps no
    tensor alive, and may be nested in or around any other mode. Like every dispatch
    mode it follows the thread that entered it, and autograd's own threads in the
    backward passes started there.

    Args:
        device: Count only storages there; by default those of every device that has
            memory.
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
        """Start a new peak at what is alive now."""
        self._ledger.reset_peak()

    def track(self, *things: Tensor | nn.Module) -> None:
        """Count what existed before: tensors, or modules with all that is in them.

        Of a module that is its parameters, their gradients, and its buffers.

        Examples:
            >>> linear, meter = nn.Linear(10, 5), StorageMeter()
            >>> meter.track(linear)
            >>> meter.live_bytes
            220
        """
        for storage in storages_in(things):
            self._add(storage)

    def counted_bytes(self, nbytes: int) -> int:
        """Return what a storage of so many bytes counts."""
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
            # The subclass then runs its inner operators, and those come here.
            return NotImplemented
        if torch.is_inference_mode_enabled() and isinstance(
            func, torch._ops.OpOverload
        ):
            # Without autograd a composite operator arrives whole; its parts count.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        self._account(func, (args, kwargs), result)
        return result

    def _account(self, func: Any, arguments: Any, result: Any) -> None:
        # `torch.tensor` fills a tensor out of sight and shows it with `lift_fresh`.
        given = set[int]() if func is torch.ops.aten.lift_fresh.default else None
        for storage in storages_in(result):
            if self._ledger.refresh(storage):
                continue
            if given is None:
                given = {id(storage) for storage in storages_in(arguments)}
            # A view of memory that existed before and is not counted makes nothing new.
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
        return actual.type != "meta"  # where nothing has memory
    return actual.type == wanted.type and wanted.index in (None, actual.index)


_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 (no stub)
_MARK = "recoup mark "


class Interval(NamedTuple):
    """The memory between two marks.

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

"""Traffic: copies in flight between one device and the host."""

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from torch import Tensor

from recoup.backend.autograd.saved_tensors import current_backward, follow_backward
from recoup.backend.memory.pinned import Buffer, BufferPool
from recoup.backend.memory.storages import version_of
from recoup.backend.memory.streams import StreamMark, Streams
from recoup.engine.tiers.device import changed
from recoup.errors import ChangedTensorError


class Parcel:
    """One storage in flight to the host, on it, or in flight back.

    Attributes:
        nbytes: Its size.
        buffer: Its host buffer.
        copied: The mark of the last copy from or to its buffer.
        source: The storage on the device, until the copy is made.
        guard: The tensor whose version shows writes to the source.
        arriving: The storage back on the device, and the mark of its copy.
        error: The reason why it must not be used.
        is_dropped: Whether it was dropped; its copy may still be in flight.
    """

    __slots__ = (
        "after",
        "arriving",
        "before",
        "buffer",
        "copied",
        "error",
        "guard",
        "is_dropped",
        "nbytes",
        "source",
        "version",
        "window_bytes",
    )

    def __init__(self, source: Tensor, guard: Tensor, window_bytes: int) -> None:
        self.nbytes = source.nbytes
        self.window_bytes = window_bytes
        self.source: Tensor | None = source
        self.guard: Tensor | None = guard
        self.version = version_of(guard)
        self.buffer: Buffer | None = None
        self.copied: StreamMark | None = None
        self.arriving: tuple[Tensor, StreamMark] | None = None
        self.error: str | None = None
        self.is_dropped = False
        self.before: Parcel | None = None
        self.after: Parcel | None = None


class Traffic:
    """Moves parcels between one device and the host without blocking either.

    See docs/design/tiers.md.

    Out: the copy runs on a separate stream. The source is freed when its copy has run,
    or when more than the window is in flight: then later work of the device waits for
    the oldest copy, and its memory can be reused at once. The calling thread never
    waits. It runs ahead of the device: when its forward ends, nearly all copies are
    still in flight.

    In: parcels are requested in reverse order, and used directly if still in the
    window, whether the copy has run or not. A request also starts fetching earlier
    parcels, as many as fit in the window. The memory is allocated on the computing
    stream, and the copy is queued behind that stream's work so far, so memory can be
    reused without `record_stream`, which would free it late.

    Attributes:
        under_way_bytes: The device memory of parcels in flight.
    """

    def __init__(self, streams: Streams, pool: BufferPool) -> None:
        self._streams = streams
        self._pool = pool
        self._leaving: deque[Parcel] = deque()
        self._spent: dict[Parcel, None] = {}  # leaving, but requested or dropped
        self._arriving: dict[Parcel, None] = {}
        self._last: Parcel | None = None
        self._task = -1
        # Calls of finalizers, run by the next owner of the lock: see `_post`.
        self._posted: deque[Callable[[], None]] = deque()
        self._lock = threading.RLock()
        self.under_way_bytes = 0

    def send(self, source: Tensor, guard: Tensor, *, window_bytes: int) -> Parcel:
        """Send a storage to the host.

        Args:
            source: Its bytes, one-dimensional.
            guard: The tensor whose version shows writes to it.
            window_bytes: The most bytes in flight.
        """
        parcel = Parcel(source, guard, window_bytes)
        with self._lock:
            self._do_posted()
            self._release_copied()
            buffer = self._pool.take(parcel.nbytes)
            parcel.buffer = buffer
            parcel.copied = self._streams.copy_out(
                buffer.memory[: parcel.nbytes],
                source,
                after=(self._streams.now(), buffer.ready),
            )
            self._link(parcel)
            if not self._streams.is_concurrent:
                parcel.source = parcel.guard = None
                return parcel
            self._leaving.append(parcel)
            self.under_way_bytes += parcel.nbytes
            while self.under_way_bytes > window_bytes and self._leaving:
                self._settle(self._leaving.popleft())
        return parcel

    def bring(self, parcel: Parcel) -> Tensor:
        """Return a parcel's storage on the device; start fetching earlier parcels."""
        with self._lock:
            self._do_posted()
            self._release_spent()
            if parcel.error is not None:
                raise ChangedTensorError(parcel.error)
            storage = self._arrived(parcel)
            if self._streams.is_concurrent:
                self._watch_backward()
                self._start_earlier(parcel)
        return storage

    def start(self, parcel: Parcel) -> None:
        """Start fetching a parcel, if it is on the host and the window has room."""
        with self._lock:
            self._do_posted()
            if self._can_start(parcel):
                self._start(parcel)

    def settle(self, parcel: Parcel) -> None:
        """Make later work of the device, such as a write, wait for a parcel's copy."""
        with self._lock:
            self._do_posted()
            self._settle_leaving(parcel)

    def drop(self, parcel: Parcel) -> None:
        """Drop a parcel; its buffer is free once its copies have run.

        During backward, a parcel that is still leaving is dropped when it has left, or
        when backward ends: waiting for it would delay other work.

        Finalizers may call this at any point, on any thread.
        """
        self._post(partial(self._drop, parcel))

    def end(self, task: int) -> None:
        """Drop parcels that a backward fetched needlessly, or dropped while leaving.

        Finalizers may call this at any point, on any thread.
        """
        self._post(partial(self._end, task))

    def _post(self, call: Callable[[], None]) -> None:
        """Run a finalizer's call without waiting for the lock.

        Garbage collection runs finalizers between any two instructions: inside the
        critical section, or on a thread that holds another lock which this lock's owner
        waits for. So the call runs now if the lock is free, and otherwise by its next
        owner.
        """
        self._posted.append(call)
        # Only a reentrant lock knows whether this thread owns it.
        if self._lock._is_owned():  # noqa: SLF001  # pyright: ignore[reportAttributeAccessIssue]
            return
        try:
            if self._lock.acquire(blocking=False):
                self._do_posted()
        finally:
            # No flag and no `suppress`, because an interrupt may come before either.
            # RuntimeError: another thread owns the lock.
            try:  # noqa: SIM105
                self._lock.release()
            except RuntimeError:
                pass

    def _do_posted(self) -> None:
        while self._posted:
            self._posted.popleft()()

    def _drop(self, parcel: Parcel) -> None:
        self._unlink(parcel)
        parcel.is_dropped = True
        self._forget_arriving(parcel)
        if parcel.source is None:
            self._give_back(parcel)
        elif self._task == -1:
            self._settle_leaving(parcel)
        else:
            self._spent[parcel] = None

    def _end(self, task: int) -> None:
        if task == self._task:
            self._task = -1
            for parcel in list(self._arriving):
                self._forget_arriving(parcel)
            for parcel in [other for other in self._leaving if other.is_dropped]:
                self._settle_leaving(parcel)
            self._release_copied()

    def _settle_leaving(self, parcel: Parcel) -> None:
        if parcel in self._leaving:
            self._leaving.remove(parcel)
            self._settle(parcel)

    def _release_copied(self) -> None:
        leaving = self._leaving
        while leaving:
            copied = leaving[0].copied
            assert copied is not None, "set when it was sent"
            if not copied.query():
                break
            self._release(leaving.popleft())

    def _release_spent(self) -> None:
        for parcel in list(self._spent):
            copied = parcel.copied
            assert copied is not None, "set when it was sent"
            if copied.query():
                self._leaving.remove(parcel)
                self._release(parcel)

    def _settle(self, parcel: Parcel) -> None:
        assert parcel.copied is not None, "set when it was sent"
        self._streams.hold_back(parcel.copied)
        self._release(parcel)

    def _release(self, parcel: Parcel) -> None:
        guard = parcel.guard
        if guard is not None and version_of(guard) != parcel.version:
            parcel.error = str(changed(guard, parcel.version))
        parcel.source = parcel.guard = None
        self.under_way_bytes -= parcel.nbytes
        self._spent.pop(parcel, None)
        if parcel.is_dropped:
            self._give_back(parcel)

    def _give_back(self, parcel: Parcel) -> None:
        buffer, ready = parcel.buffer, parcel.copied
        if buffer is not None and ready is not None:
            parcel.buffer = None
            self._pool.give(Buffer(buffer.memory, ready))

    def _arrived(self, parcel: Parcel) -> Tensor:
        source, guard = parcel.source, parcel.guard
        if source is not None and guard is not None:
            if version_of(guard) != parcel.version:
                raise changed(guard, parcel.version)
            self._spent[parcel] = None
            return source
        if parcel.arriving is None:
            self._start(parcel)
        assert parcel.arriving is not None, "just started"
        storage, complete = parcel.arriving
        self._streams.hold_back(complete)
        self._forget_arriving(parcel, waited=True)
        return storage

    def _start(self, parcel: Parcel) -> None:
        buffer, copied = parcel.buffer, parcel.copied
        assert buffer is not None, "it is on the host"
        assert copied is not None, "it is on the host"
        storage = self._streams.allocate(parcel.nbytes)
        complete = self._streams.copy_in(
            storage, buffer.memory[: parcel.nbytes], after=(self._streams.now(), copied)
        )
        parcel.copied = complete
        parcel.arriving = storage, complete
        self._arriving[parcel] = None
        self.under_way_bytes += parcel.nbytes

    def _can_start(self, parcel: Parcel) -> bool:
        return (
            self._streams.is_concurrent
            and parcel.source is None
            and parcel.arriving is None
            and parcel.buffer is not None
            and parcel.error is None
            and self.under_way_bytes + parcel.nbytes <= parcel.window_bytes
        )

    def _start_earlier(self, parcel: Parcel) -> None:
        earlier = parcel.before
        while earlier is not None:
            self._make_room(earlier)
            if self._can_start(earlier):
                self._start(earlier)
            elif earlier.source is None and earlier.arriving is None:
                break
            earlier = earlier.before

    def _make_room(self, parcel: Parcel) -> None:
        """Make the device wait for leaving parcels that were requested or dropped."""
        room_bytes = parcel.window_bytes - parcel.nbytes
        if self.under_way_bytes <= room_bytes or parcel.source is not None:
            return
        for spent in list(self._spent):
            if self.under_way_bytes <= room_bytes:
                break
            self._leaving.remove(spent)
            self._settle(spent)

    def _forget_arriving(self, parcel: Parcel, *, waited: bool = False) -> None:
        """Free memory that is being copied to, in stream order."""
        if parcel.arriving is not None:
            if not waited:
                self._streams.hold_back(parcel.arriving[1])
            parcel.arriving = None
            del self._arriving[parcel]
            self.under_way_bytes -= parcel.nbytes

    def _watch_backward(self) -> None:
        task = current_backward()
        if task not in (-1, self._task):
            self._task = task
            follow_backward(self)

    def _link(self, parcel: Parcel) -> None:
        parcel.before = self._last
        if self._last is not None:
            self._last.after = parcel
        self._last = parcel

    def _unlink(self, parcel: Parcel) -> None:
        before, after = parcel.before, parcel.after
        if before is not None:
            before.after = after
        if after is not None:
            after.before = before
        if self._last is parcel:
            self._last = before
        parcel.before = parcel.after = None

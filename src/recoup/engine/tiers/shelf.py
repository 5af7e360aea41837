"""The shelf: storages in files, written and read in the background."""

import atexit
import contextlib
import functools
import itertools
import os
import shutil
import stat
import sys
import tempfile
import threading
import time
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from recoup.backend.memory.pinned import Buffer, BufferPool, memory_of
from recoup.core.units import print_bytes
from recoup.engine.tiers.account import ACCOUNTS
from recoup.engine.tiers.host import OnHost, pool_of
from recoup.errors import TierError

try:
    import fcntl
except ImportError:  # not a POSIX system: directories of dead processes stay
    fcntl = None

PREFIX = "recoup-disk-"
_LOCK = "owner.lock"
_UNFINISHED_SECONDS = 60.0
"""The age at which a directory without a lock counts as abandoned."""


class PrivateDirectory:
    """A directory that only this process uses, with a lock that dies with it.

    Creating one removes those of dead processes in the same place, which are unlocked.
    Nothing in them is read.

    Raises:
        TierError: It cannot be created there.

    Examples:
        >>> with tempfile.TemporaryDirectory() as base:
        ...     directory = PrivateDirectory(Path(base))
        ...     made = directory.path.is_dir()
        ...     directory.remove()
        ...     made, list(Path(base).iterdir())
        (True, [])
    """

    def __init__(self, base: Path) -> None:
        self._owner = os.getpid()
        try:
            remove_abandoned(base)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            # Locked before it gets its name, so that no process finds it unlocked.
            unnamed = self.path / f"{_LOCK}.new"
            self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
            _try_lock(self._lock)
            unnamed.rename(self.path / _LOCK)
        except OSError as error:
            raise TierError(
                f"the disk tier cannot make a directory in {base}: {error}. Name "
                "another place with Disk(directory=...)."
            ) from error

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process made it; a forked child does not own its files."""
        return os.getpid() == self._owner

    def remove(self) -> None:
        """Remove the directory and its contents; a second call does nothing."""
        if self.is_of_this_process:
            shutil.rmtree(self.path, ignore_errors=True)
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1


def remove_abandoned(base: Path) -> list[Path]:
    """Remove and return the directories that dead processes of this user left."""
    if fcntl is None:
        return []
    found = [path for path in base.glob(PREFIX + "*") if _is_abandoned(path)]
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
    return found


def _is_abandoned(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return False
        try:
            lock = os.open(path / _LOCK, os.O_RDWR)
        except FileNotFoundError:
            return time.time() - status.st_mtime > _UNFINISHED_SECONDS
        try:
            return _try_lock(lock)
        finally:
            os.close(lock)
    return False


def _try_lock(file: int) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class ShelfSlot:
    """One storage on a shelf.

    Attributes:
        number: Its number in the order of `put` calls.
        path: Its file.
        nbytes: Its size.
        host: Its copy on the host, until the file is written.
        checksum: The checksum of the file, once it is written.
        reading: The contents, while they are read.
        is_waiting: Whether it counts as host memory that waits for the disk.
        is_unwritable: Whether writing it failed, so that it stays until it is dropped.
        is_dropped: Whether it was dropped.
    """

    def __init__(self, number: int, path: Path, host: OnHost) -> None:
        self.number = number
        self.path = path
        self.nbytes = host.nbytes
        self.host: OnHost | None = host
        self.checksum = 0
        self.reading: Future[Buffer] | None = None
        self.is_waiting = True
        self.is_unwritable = False
        self.is_dropped = False
        self.lock = threading.Lock()


class Worker:
    """Runs jobs in order on a separate thread.

    `submit` neither waits nor takes a lock, so finalizers may call it at any point. An
    executor's `submit` takes two locks, and deadlocks if garbage collection calls it
    from a finalizer during another `submit`.
    """

    def __init__(self, name: str) -> None:
        # The one queue of the standard library whose `put` is reentrant.
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], object]) -> None:
        """Run a job after those submitted before."""
        self._jobs.put(job)

    def drain(self) -> None:
        """Wait until all submitted jobs are done."""
        done = threading.Event()
        self.submit(done.set)
        done.wait()

    def stop(self) -> None:
        """Run all submitted jobs, and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # noqa: BLE001 (those who wait for later jobs need them)
                error = threading.ExceptHookArgs((*sys.exc_info(), self._thread))
                threading.excepthook(error)
            del job  # keeps nothing alive while this thread waits for the next job


class Shelf:
    """Writes and reads the files of one process in one place.

    One thread writes and removes, one reads. `put` waits only when more than
    `queue_bytes` have not been written yet: otherwise a slow disk would fill the host.

    Values that cannot be written, because the disk is full or the directory was
    removed, stay on the host and count as waiting. So a step that fits in the queue
    loses nothing, and a later one tries the disk again.

    Args:
        base: The parent of the private directory.
        pool: The pool of host buffers to read into.
        queue_bytes: The most bytes that wait to be written, and that are read ahead.
    """

    def __init__(self, base: Path, pool: BufferPool, queue_bytes: int) -> None:
        self.directory = PrivateDirectory(base)
        self._base = base
        self._pool = pool
        self._queue_bytes = queue_bytes
        self._numbers = itertools.count()
        self._slots: dict[int, ShelfSlot] = {}
        self._writer = Worker("recoup-write")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="recoup-read")
        self._room = threading.Condition()
        self._waiting_bytes = 0
        self._ahead_bytes = 0
        self._failure: str | None = None
        self._is_reported = False
        self._is_ending = False
        atexit.register(self._end)

    @property
    def is_of_this_process(self) -> bool:
        """Whether it belongs to this process.

        A forked child has none of the threads, and locks in an arbitrary state.
        """
        return self.directory.is_of_this_process

    def put(self, host: OnHost) -> ShelfSlot:
        """Write a storage on the host to a file, and free its host memory.

        Warns:
            UserWarning: An earlier one could not be written and stays on the host.

        Raises:
            TierError: The queue is full of storages that could not be written.
        """
        number = next(self._numbers)
        slot = ShelfSlot(number, self.directory.path / f"{number:08d}", host)
        try:
            with self._room:
                # Storages that cannot be written never make room.
                self._room.wait_for(lambda: self._has_room() or self._is_stuck())
                if not self._has_room():
                    self._is_reported = True
                    raise TierError(self._failure)
                self._waiting_bytes += slot.nbytes
                self._slots[number] = slot
            self._report()  # only if no error with the same message was raised
        except BaseException:
            with self._room:
                if self._slots.pop(number, None) is not None:
                    self._finish_waiting(slot)
                    self._room.notify_all()
            host.drop()
            raise
        ACCOUNTS.disk.put(slot.nbytes)
        self._writer.submit(partial(self._write, slot))
        return slot

    def _report(self) -> None:
        """Warn once that something could not be written."""
        failure = self._failure
        if failure is not None and not self._is_reported:
            self._is_reported = True
            warnings.warn(
                f"{failure} What cannot be written stays in host memory, within "
                "queue_bytes.",
                stacklevel=2,
            )

    def contents(self, slot: ShelfSlot) -> Buffer:
        """Return the contents of a file, waiting for them if necessary.

        Raises:
            TierError: It is missing or damaged.
        """
        with self._room:
            self.read_ahead(slot)
            reading = self._taken(slot)
            assert reading is not None, "just begun"
            for earlier in self._before(slot):
                if self._ahead_bytes + earlier.nbytes > self._queue_bytes:
                    break
                self.read_ahead(earlier)
        try:
            return reading.result()
        finally:
            del reading  # breaks a cycle: it holds the error, which holds this frame

    def read_ahead(self, slot: ShelfSlot) -> None:
        """Start reading a file."""
        with self._room:
            if slot.reading is None:
                self._ahead_bytes += slot.nbytes
                slot.reading = self._reader.submit(self._read, slot)

    def drop(self, slot: ShelfSlot) -> None:
        """Remove a file in the background, and its contents if they were read.

        Finalizers may call this at any point, on any thread.
        """
        slot.is_dropped = True
        self._writer.submit(partial(self._remove, slot))

    def give_back(self, buffer: Buffer) -> None:
        """Return a buffer to the pool."""
        self._pool.give(buffer)

    def drain(self) -> None:
        """Wait until all reads and writes are done."""
        self._writer.drain()
        self._reader.submit(int).result()

    def _has_room(self) -> bool:
        return self._waiting_bytes == 0 or self._waiting_bytes < self._queue_bytes

    def _is_stuck(self) -> bool:
        """Return whether all waiting storages are unwritable and still in use."""
        waiting = [slot for slot in self._slots.values() if slot.is_waiting]
        return all(slot.is_unwritable and not slot.is_dropped for slot in waiting)

    def _before(self, slot: ShelfSlot) -> list[ShelfSlot]:
        """Return the files put before one, latest first."""
        slots = self._slots
        numbers = sorted((n for n in slots if n < slot.number), reverse=True)
        earlier = [slots[number] for number in numbers]
        return [s for s in earlier if s.host is None and not s.is_dropped]

    def _taken(self, slot: ShelfSlot) -> "Future[Buffer] | None":
        """Return the pending read, which no longer counts as read ahead."""
        with self._room:
            reading, slot.reading = slot.reading, None
            if reading is not None:
                self._ahead_bytes -= slot.nbytes
            return reading

    def _write(self, slot: ShelfSlot) -> None:
        """Write a file; on the writer's thread."""
        host, failure = slot.host, None
        assert host is not None, "not written yet"
        if not slot.is_dropped and not self._is_ending:
            failure = self._try_to_write(slot, host)
        if failure is None:
            with slot.lock:
                slot.host = None
            host.drop()
        with self._room:
            self._failure = failure or self._failure
            if failure is None:
                self._finish_waiting(slot)
                if not slot.is_dropped:
                    self._failure = None
                    self._is_reported = False
            else:
                slot.is_unwritable = True
            self._room.notify_all()

    def _try_to_write(self, slot: ShelfSlot, host: OnHost) -> str | None:
        """Write a file; return the reason if that failed."""
        try:
            contents = host.wait()
            slot.checksum = zlib.crc32(contents)
            if not self.directory.path.is_dir():
                self.directory = PrivateDirectory(self._base)
            slot.path = self.directory.path / slot.path.name
            _write_file(slot.path, contents)
        except TierError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 (the host still has the storage)
            with suppress(OSError):
                slot.path.unlink(missing_ok=True)
            return (
                f"the disk tier could not write {print_bytes(slot.nbytes)} to "
                f"{slot.path}: {error}. Free space there, or choose another place with "
                "Disk(directory=...)."
            )
        return None

    def _finish_waiting(self, slot: ShelfSlot) -> None:
        if slot.is_waiting:
            slot.is_waiting = False
            self._waiting_bytes -= slot.nbytes

    def _read(self, slot: ShelfSlot) -> Buffer:
        buffer = self._pool.take(slot.nbytes)
        try:
            buffer.ready.synchronize()
            contents = memory_of(buffer.memory[: slot.nbytes])
            _read_file(slot.path, contents)
            if zlib.crc32(contents) != slot.checksum:
                raise _damaged(slot, "its contents are not what was written")
        except BaseException as error:
            self._pool.give(buffer)
            if isinstance(error, (OSError, EOFError)):
                raise _damaged(slot, str(error)) from error
            raise
        return buffer

    def _remove(self, slot: ShelfSlot) -> None:
        """Remove a file; on the writer's thread, hence after it was written."""
        with slot.lock:
            host, slot.host = slot.host, None
        if host is not None:
            host.drop()
        with suppress(OSError):  # the directory is removed at exit anyway
            slot.path.unlink(missing_ok=True)
        reading = self._taken(slot)
        if reading is not None:
            reading.add_done_callback(self._return)
        with self._room:
            self._slots.pop(slot.number, None)
            self._finish_waiting(slot)
            self._room.notify_all()
        ACCOUNTS.disk.dropped(slot.nbytes)

    def _return(self, reading: "Future[Buffer]") -> None:
        if not reading.cancelled() and reading.exception() is None:
            self._pool.give(reading.result())

    def _end(self) -> None:
        """Stop writing and remove all files, at process exit."""
        self._is_ending = True
        if self.is_of_this_process:
            self._writer.stop()
        self.directory.remove()


def _damaged(slot: ShelfSlot, reason: str) -> TierError:
    return TierError(
        f"the disk tier cannot bring back {print_bytes(slot.nbytes)} from {slot.path}: "
        f"{reason}. Something else removed or changed the file; run the step again."
    )


def _write_file(path: Path, contents: memoryview) -> None:
    with path.open("xb", buffering=0) as file:
        while contents:
            written = file.write(contents)
            contents = contents[written:]


def _read_file(path: Path, contents: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        while contents:
            count = file.readinto(contents)
            if not count:
                raise EOFError(f"it ends {print_bytes(len(contents))} early")
            contents = contents[count:]
        if file.read(1):
            raise EOFError("it is longer than it was written")


@functools.cache
def _shelf(base: Path, device_type: str, queue_bytes: int, process: int) -> Shelf:
    del process
    return Shelf(base, pool_of(device_type), queue_bytes)


def shelf_in(base: Path, device_type: str, queue_bytes: int) -> Shelf:
    """Return this process's shelf in a directory, for devices of a type."""
    return _shelf(base, device_type, queue_bytes, os.getpid())

"""The shelf: storages in files, written and read in the background."""

import atexit
import functools
import itertools
import os
import threading
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from recoup.backend.pinned import Buffer, BufferPool, memory_of
from recoup.core.errors import TierError
from recoup.core.units import print_bytes
from recoup.engine.tiers.account import ACCOUNTS
from recoup.engine.tiers.directory import PrivateDirectory
from recoup.engine.tiers.host import OnHost, pool_of


class Slot:
    """One storage on a shelf.

    Attributes:
        number: Its place in the order of putting.
        path: Its file.
        nbytes: Its size.
        host: Its copy on the host, until the file is written.
        checksum: What the file must have, once it is written.
        reading: The contents, on their way back.
        error: Why it was not written.
        is_dropped: Nobody wants it any more.
    """

    def __init__(self, number: int, path: Path, host: OnHost) -> None:
        self.number = number
        self.path = path
        self.nbytes = host.nbytes
        self.host: OnHost | None = host
        self.checksum = 0
        self.reading: Future[Buffer] | None = None
        self.error: str | None = None
        self.is_dropped = False
        self.lock = threading.Lock()


class Shelf:
    """Writes and reads the files of one process in one place.

    One thread writes and removes, one reads. Whoever puts waits only when more than
    `queue_bytes` have not been written yet: otherwise a slow disk would fill the host.

    Args:
        base: Where the private directory is made.
        pool: Host buffers to read into.
        queue_bytes: How much may wait to be written, and how much is read ahead.
    """

    def __init__(self, base: Path, pool: BufferPool, queue_bytes: int) -> None:
        self.directory = PrivateDirectory(base)
        self._pool = pool
        self._queue_bytes = queue_bytes
        self._numbers = itertools.count()
        self._slots: dict[int, Slot] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="recoup-write")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="recoup-read")
        self._room = threading.Condition()
        self._waiting_bytes = 0
        self._ahead_bytes = 0
        self._failure: str | None = None
        atexit.register(self.directory.remove)

    @property
    def is_of_this_process(self) -> bool:
        """Whether it is this process's.

        A forked child has none of the threads, and locks as they were at that moment.
        """
        return self.directory.is_of_this_process

    def put(self, host: OnHost) -> Slot:
        """Write what is on the host to a file, and drop it there.

        Raises:
            TierError: An earlier one could not be written.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            host.drop()
            raise TierError(failure)
        number = next(self._numbers)
        slot = Slot(number, self.directory.path / f"{number:08d}", host)
        with self._room:
            self._room.wait_for(self._has_room)
            self._waiting_bytes += slot.nbytes
        self._slots[number] = slot
        ACCOUNTS.disk.put(slot.nbytes)
        self._writer.submit(self._write, slot)
        return slot

    def contents(self, slot: Slot) -> Buffer:
        """Return what is in a file, waiting for it if need be.

        Raises:
            TierError: It was not written, is missing, or is not what was written.
        """
        if slot.error is not None:
            if self._failure is slot.error:
                self._failure = None
            raise TierError(slot.error)
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
            del reading  # it holds the error, and the error this frame

    def read_ahead(self, slot: Slot) -> None:
        """Begin to read a file."""
        with self._room:
            if slot.reading is None and slot.error is None:
                self._ahead_bytes += slot.nbytes
                slot.reading = self._reader.submit(self._read, slot)

    def drop(self, slot: Slot) -> None:
        """Remove a file in the background, and its contents if they were read."""
        slot.is_dropped = True
        self._slots.pop(slot.number, None)
        try:
            self._writer.submit(self._remove, slot)
        except RuntimeError:  # the process ends, and will remove the directory
            self._remove(slot)

    def give_back(self, buffer: Buffer) -> None:
        """Take a buffer back whose contents are used by then."""
        self._pool.give(buffer)

    def drain(self) -> None:
        """Wait until everything that was begun is done."""
        self._writer.submit(int).result()
        self._reader.submit(int).result()

    def _has_room(self) -> bool:
        return self._waiting_bytes == 0 or self._waiting_bytes < self._queue_bytes

    def _before(self, slot: Slot) -> list[Slot]:
        """Return the files put before one, the last of them first."""
        slots = self._slots
        numbers = sorted((n for n in slots if n < slot.number), reverse=True)
        return [slots[number] for number in numbers if slots[number].host is None]

    def _taken(self, slot: Slot) -> "Future[Buffer] | None":
        """Return the contents on their way back, which count no longer as ahead."""
        with self._room:
            reading, slot.reading = slot.reading, None
            if reading is not None:
                self._ahead_bytes -= slot.nbytes
            return reading

    def _write(self, slot: Slot) -> None:
        host = slot.host
        try:
            if host is not None and not slot.is_dropped:
                contents = host.wait()
                slot.checksum = zlib.crc32(contents)
                _write_file(slot.path, contents)
        except OSError as error:
            slot.path.unlink(missing_ok=True)
            slot.error = self._failure = (
                f"the disk tier could not write {print_bytes(slot.nbytes)} to "
                f"{slot.path}: {error}. Free space there, or name another place with "
                "Disk(directory=...)."
            )
        finally:
            with slot.lock:
                slot.host = None
            if host is not None:
                host.drop()
            with self._room:
                self._waiting_bytes -= slot.nbytes
                self._room.notify_all()

    def _read(self, slot: Slot) -> Buffer:
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

    def _remove(self, slot: Slot) -> None:
        slot.path.unlink(missing_ok=True)
        reading = self._taken(slot)
        if reading is not None:
            reading.add_done_callback(self._return)
        ACCOUNTS.disk.dropped(slot.nbytes)

    def _return(self, reading: "Future[Buffer]") -> None:
        if not reading.cancelled() and reading.exception() is None:
            self._pool.give(reading.result())


def _damaged(slot: Slot, reason: str) -> TierError:
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
    """Return the shelf of this process in a place, for devices of a type."""
    return _shelf(base, device_type, queue_bytes, os.getpid())

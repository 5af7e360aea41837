"""The disk tier: values in files between forward and backward."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from recoup.backend.memory.pinned import Buffer
from recoup.backend.memory.streams import streams_of
from recoup.core.units import print_bytes
from recoup.engine.tiers.account import ACCOUNTS
from recoup.engine.tiers.host import WINDOW_BYTES, OnHost
from recoup.engine.tiers.protocol import ExactTier, Stored, check_sizes
from recoup.engine.tiers.shelf import Shelf, ShelfSlot, shelf_in
from recoup.errors import TierError, UsageError

QUEUE_BYTES = 1 << 30
SMALLEST_BYTES = 1 << 20
"""A file costs some hundred microseconds, as long as a disk takes to write a MiB."""


@dataclass(frozen=True)
class Disk(ExactTier):
    """Keep values in files, exactly.

    A value is copied to the host as with `Host`, and from there written to a file in a
    private directory, in the background. In backward files are read ahead in reverse
    order. Every file's checksum is compared before its contents are used.

    Values that cannot be written, because the disk is full or the directory was
    removed, stay in host memory with a warning; more than `queue_bytes` of them raise a
    `TierError` in forward. A missing or damaged file raises a `TierError` in backward.
    Both name the file and the reason. The directory is removed when the process ends.
    Files of a killed process are never read, and removed by the next process that uses
    the same directory.

    The calling thread waits only for the disk: in forward when more than `queue_bytes`
    are not written yet, in backward when a file has not been read in time.

    Args:
        directory: The parent of the private directory; by default the one for
            temporary files.
        queue_bytes: Host memory for unwritten values, and for files read ahead.
        window_bytes: As for `Host`.
        smallest_bytes: Storages of fewer bytes stay on the device.

    Raises:
        UsageError: The directory does not exist, or a number of bytes is negative.

    Examples:
        >>> import torch
        >>> from recoup import CheckpointScope
        >>> x = torch.linspace(-1, 1, 300_000, requires_grad=True)
        >>> with CheckpointScope("block", store=Disk()):
        ...     y = x.exp().sin()
        >>> y.sum().backward()
        >>> torch.equal(x.grad, (x.exp().cos() * x.exp()).detach())
        True
    """

    directory: str | Path | None = None
    queue_bytes: int = QUEUE_BYTES
    window_bytes: int = WINDOW_BYTES
    smallest_bytes: int = SMALLEST_BYTES

    def __post_init__(self) -> None:
        if self.directory is not None and not Path(self.directory).is_dir():
            raise UsageError(
                "expected Disk(directory=...) to be an existing directory, got "
                f"{str(self.directory)!r}; make it first."
            )
        check_sizes(
            queue_bytes=self.queue_bytes,
            window_bytes=self.window_bytes,
            smallest_bytes=self.smallest_bytes,
        )

    def takes(self, nbytes: int) -> bool:
        """Return whether a storage is large enough for a file."""
        return nbytes >= self.smallest_bytes

    def put(self, storage: Tensor, guard: Tensor | None = None) -> Stored:
        """Start the copy to the host, followed by writing the file."""
        base = Path(self.directory or tempfile.gettempdir()).resolve()
        shelf = shelf_in(base, storage.device.type, self.queue_bytes)
        return OnDisk(shelf, storage, guard, self.window_bytes)


class OnDisk(Stored):
    """One storage on disk, or being written or read."""

    _slot: ShelfSlot | None = None

    def __init__(
        self, shelf: Shelf, storage: Tensor, guard: Tensor | None, window_bytes: int
    ) -> None:
        self._shelf = shelf
        self._dtype = storage.dtype
        self._streams = streams_of(storage.device)
        host = OnHost(storage, storage if guard is None else guard, window_bytes)
        self._slot = shelf.put(host)

    @property
    def nbytes(self) -> int:
        """The bytes of the storage."""
        return 0 if self._slot is None else self._slot.nbytes

    def get(self) -> Tensor:
        """Return the storage, waiting for the file if it is not read yet."""
        slot = self._slot
        assert slot is not None, "not dropped"
        if not self._shelf.is_of_this_process:
            raise TierError(
                f"the disk tier cannot bring back {print_bytes(slot.nbytes)} from "
                f"{slot.path}: that is a file of the process from which this one was "
                "forked. Run forward in the process that runs backward."
            )
        with slot.lock:
            if slot.host is not None:
                return slot.host.get()
        buffer = self._shelf.contents(slot)
        ACCOUNTS.disk.got(slot.nbytes)
        streams = self._streams
        storage = streams.allocate(slot.nbytes)
        complete = streams.copy_in(
            storage, buffer.memory[: slot.nbytes], after=(streams.now(),)
        )
        streams.hold_back(complete)
        self._shelf.give_back(Buffer(buffer.memory, complete))
        return storage.view(self._dtype)

    def prefetch(self) -> None:
        """Start reading the file."""
        slot = self._slot
        if slot is not None and slot.host is None and self._shelf.is_of_this_process:
            self._shelf.read_ahead(slot)

    def settle(self) -> None:
        """Make later work of the device wait for the copy to the host."""
        slot = self._slot
        if slot is not None and self._shelf.is_of_this_process:
            with slot.lock:
                if slot.host is not None:
                    slot.host.settle()

    def drop(self) -> None:
        """Remove the file."""
        slot, self._slot = self._slot, None
        if slot is not None and self._shelf.is_of_this_process:
            self._shelf.drop(slot)

    def __del__(self) -> None:
        self.drop()

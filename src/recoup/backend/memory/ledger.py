"""A ledger of unique storages: which are counted, their sizes, when they die."""

import collections
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class StorageLedger:
    """Count unique storages from the moment they are added until they die.

    Torch keeps the Python object of a storage alive as long as the storage itself, even
    if only C++ refers to it. So a weak reference to that object dies exactly with the
    bytes, and `id` identifies a live storage. The weak reference's callback may run in
    any thread and must take no lock, so it only queues the death; every method first
    processes the queue.

    Args:
        block_bytes: Round every storage up to a multiple.

    Examples:
        >>> ledger = StorageLedger()
        >>> ones = torch.ones(10)
        >>> ledger.add(ones.untyped_storage()), ledger.add(ones[2:].untyped_storage())
        (True, False)
        >>> ledger.live_bytes
        40
        >>> del ones
        >>> ledger.live_bytes, ledger.peak_bytes, ledger.total_bytes
        (0, 40, 40)
    """

    def __init__(self, *, block_bytes: int = 1) -> None:
        self._block_bytes = block_bytes
        # Reentrant, because a garbage collection inside may run foreign finalizers.
        self._lock = threading.RLock()
        self._entries: dict[int, _Entry] = {}
        self._deaths: collections.deque[_Entry] = collections.deque()
        self._live_bytes = 0
        self._peak_bytes = 0
        self._total_bytes = 0

    @property
    def live_bytes(self) -> int:
        """Bytes of the added storages that are alive now."""
        with self._lock:
            self._bury()
            return self._live_bytes

    @property
    def peak_bytes(self) -> int:
        """The largest `live_bytes` since the start or `reset_peak`."""
        return self._peak_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all storages ever added, each at its size when it was added."""
        return self._total_bytes

    def reset_peak(self) -> None:
        """Restart the peak at the bytes that are alive now."""
        with self._lock:
            self._bury()
            self._peak_bytes = self._live_bytes

    def add(self, storage: torch.UntypedStorage) -> bool:
        """Count `storage`; return whether it was new."""
        with self._lock:
            if self.refresh(storage):
                return False
            entry = _Entry(storage, self._deaths.append)
            entry.key, entry.counted_bytes = id(storage), 0
            self._entries[entry.key] = entry
            self._total_bytes += storage.nbytes()
            self.refresh(storage)
            return True

    def add_all(self, tree: Any) -> None:
        """Count the storages of all tensors in a pytree; see `storages_in`."""
        for storage in storages_in(tree):
            self.add(storage)

    def refresh(self, storage: torch.UntypedStorage) -> bool:
        """Update the size of `storage` if it is counted; return whether it is."""
        with self._lock:
            self._bury()
            entry = self._entries.get(id(storage))
            if entry is None:
                return False
            now_bytes = self.counted_bytes(storage.nbytes())
            self._live_bytes += now_bytes - entry.counted_bytes
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)
            entry.counted_bytes = now_bytes
            return True

    def counted_bytes(self, nbytes: int) -> int:
        """Return the size counted for a storage of `nbytes`."""
        return rounded_up(nbytes, self._block_bytes)

    def watch_resizes(self) -> None:
        """Count `UntypedStorage.resize_` at once, until `unwatch_resizes`."""
        _RESIZES.watch(self)

    def unwatch_resizes(self) -> None:
        """Undo one `watch_resizes`."""
        _RESIZES.unwatch(self)

    def _bury(self) -> None:
        while self._deaths:
            entry = self._deaths.popleft()
            del self._entries[entry.key]
            self._live_bytes -= entry.counted_bytes


def rounded_up(nbytes: int, multiple: int) -> int:
    """Return a number of bytes, rounded up to a multiple.

    Examples:
        >>> [rounded_up(nbytes, 512) for nbytes in (0, 1, 512, 513)]
        [0, 512, 512, 1024]
    """
    return -(-nbytes // multiple) * multiple


def storages_in(tree: Any) -> list[torch.UntypedStorage]:
    """Return the storages of all tensors in nested tuples, lists and dictionaries.

    A module counts as its parameters, gradients and buffers. A strided tensor has one
    storage, a sparse tensor one for its values and for each of its indices, a wrapper
    subclass those of its inner tensors, an opaque tensor none.

    Examples:
        >>> tree = {"a": torch.ones(2), "b": ("text", torch.eye(3).to_sparse())}
        >>> [storage.nbytes() for storage in storages_in(tree)]
        [8, 48, 12]
    """
    found: list[torch.UntypedStorage] = []
    _collect(tree, found)
    return found


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements, of any layout and kind.

    A sparse tensor or a wrapper subclass counts as its parts, a sharded tensor as its
    shard.

    Examples:
        >>> tensor_bytes(torch.ones(2)), tensor_bytes(torch.eye(3).to_sparse())
        (8, 60)
    """
    if _has_one_storage(tensor):
        return tensor.nbytes
    parts = [part for part in _parts(tensor) if isinstance(part, Tensor)]
    return sum(map(tensor_bytes, parts))


def _has_one_storage(tensor: Tensor) -> bool:
    is_strided = tensor.layout is torch.strided
    return is_strided and not is_traceable_wrapper_subclass(tensor)


def _collect(tree: Any, found: list[torch.UntypedStorage]) -> None:
    # By hand: this runs twice per operator, and torch's pytrees are slower.
    if isinstance(tree, Tensor):
        if _has_one_storage(tree):
            found.append(tree.untyped_storage())
        else:
            _collect(_parts(tree), found)
    elif isinstance(tree, tuple | list):
        for branch in tree:
            _collect(branch, found)
    elif isinstance(tree, dict):
        _collect(list(tree.values()), found)
    elif isinstance(tree, nn.Module):
        for parameter in tree.parameters():
            _collect((parameter, parameter.grad), found)
        _collect(list(tree.buffers()), found)


def _parts(tensor: Tensor) -> list[Any]:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [getattr(tensor, name) for name in names]
    return [getattr(tensor, name)() for name in _PARTS.get(tensor.layout, ())]


_PARTS = {
    # Private: `indices()` and `values()` reject uncoalesced tensors.
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


class _Entry(weakref.ref[torch.UntypedStorage]):
    """A counted storage; refers to the queue, not the ledger, to avoid a cycle."""

    __slots__ = ("counted_bytes", "key")

    key: int
    counted_bytes: int


class _ResizeWatch:
    """Notifies ledgers of `UntypedStorage.resize_`, which no dispatch mode sees.

    Patches the method on the class while any ledger watches. That is process-wide
    state, hence the one instance below.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ledgers: tuple[StorageLedger, ...] = ()

    def watch(self, ledger: StorageLedger) -> None:
        with self._lock:
            if not self._ledgers:
                torch.UntypedStorage.resize_ = _resize_and_tell  # pyright: ignore[reportAttributeAccessIssue]
            self._ledgers = (*self._ledgers, ledger)

    def unwatch(self, ledger: StorageLedger) -> None:
        with self._lock:
            position = self._ledgers.index(ledger)
            self._ledgers = self._ledgers[:position] + self._ledgers[position + 1 :]
            if not self._ledgers:
                del torch.UntypedStorage.resize_

    def notify(self, storage: torch.UntypedStorage) -> None:
        for ledger in self._ledgers:
            ledger.refresh(storage)


def _resize_and_tell(
    storage: torch.UntypedStorage, size_bytes: int
) -> torch.UntypedStorage:
    _resize(storage, size_bytes)
    _RESIZES.notify(storage)
    return storage


_resize = torch.UntypedStorage.resize_
_RESIZES = _ResizeWatch()

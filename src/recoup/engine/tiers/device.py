"""The device tier: values stay on their device."""

from dataclasses import dataclass

from torch import Tensor

from recoup.backend.memory.storages import version_of
from recoup.engine.tiers.protocol import ExactTier, Stored
from recoup.errors import ChangedTensorError


@dataclass(frozen=True, slots=True)
class Device(ExactTier):
    """Keep values on their device, by reference, at no cost.

    Examples:
        >>> import torch
        >>> x = torch.ones(3)
        >>> Device().put(x).get() is x
        True
    """

    def takes(self, nbytes: int) -> bool:
        """Return True: nothing is moved."""
        del nbytes
        return True

    def put(self, storage: Tensor, guard: Tensor | None = None) -> Stored:
        """Hold the storage itself."""
        return _OnDevice(storage, storage if guard is None else guard)


class _OnDevice(Stored):
    def __init__(self, storage: Tensor, guard: Tensor) -> None:
        self._storage: Tensor | None = storage
        self._guard: Tensor | None = guard
        self._version = version_of(guard)

    @property
    def nbytes(self) -> int:
        return 0 if self._storage is None else self._storage.nbytes

    def get(self) -> Tensor:
        storage, guard = self._storage, self._guard
        assert storage is not None, "not dropped"
        assert guard is not None, "not dropped"
        if version_of(guard) != self._version:
            raise changed(guard, self._version)
        return storage

    def drop(self) -> None:
        self._storage = None
        self._guard = None

    def settle(self) -> None:
        if self._storage is not None:
            self._storage = self._storage.clone()
            self._guard = self._storage
            self._version = version_of(self._storage)


def changed(guard: Tensor, version: int) -> ChangedTensorError:
    """Return the error for a storage that was written to while backward needed it."""
    return ChangedTensorError(
        f"a tensor of shape {tuple(guard.shape)} and type {guard.dtype} that a "
        "checkpointed region keeps for backward was changed in place (it is at version "
        f"{version_of(guard)}, the region keeps version {version}). Change it after "
        "backward, or give the region a clone of it."
    )

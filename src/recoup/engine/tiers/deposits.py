"""Deposits: a storage in a tier, shared by all saved tensors on it."""

import threading
import weakref
from typing import Protocol

from torch import Tensor

from recoup.backend.autograd.saved_tensors import current_backward, out_of_sight
from recoup.backend.memory.storages import (
    flat,
    free_weak_reference,
    storage_address,
    take_weak_reference,
    version_of,
)
from recoup.engine.tiers.protocol import Tier


class DepositClaim(Protocol):
    """A user of a deposit in backward.

    Attributes:
        task: The last backward in which it fetched the deposit.
    """

    task: int


class Deposit:
    """One storage at one version in a tier, fetched once in each backward.

    The fetched storage stays on the device until every claim has been served, at most
    until backward ends.

    Attributes:
        claims: The number of tensors saved by autograd that refer to it.
        is_exact: Whether it is returned bitwise.
        nbytes: The bytes of the storage.
        is_current: Whether no region has written to the storage since.
    """

    _address = 0
    _brought_version = 0
    is_current = True

    def __init__(self, tier: Tier, tensor: Tensor) -> None:
        self.claims = 0
        self.is_exact = tier.is_exact
        self.version = version_of(tensor)
        self._brought: Tensor | None = None
        self._served = 0
        self._task = -1
        with out_of_sight():
            whole = flat(tensor)
            self.nbytes = whole.nbytes
            self._stored = tier.put(whole, tensor)
        # Reserved while this lives, so that no other storage gets the address.
        self._address = take_weak_reference(tensor.untyped_storage())

    @property
    def stored_bytes(self) -> int:
        """The bytes it takes in its tier."""
        return self._stored.nbytes

    def matches(self, tensor: Tensor) -> bool:
        """Return whether the tensor's storage is unchanged since it was put in."""
        return self.is_current and self.version == version_of(tensor)

    def fetch(self, claim: DepositClaim | None = None) -> Tensor:
        """Return the storage on its device.

        Args:
            claim: The caller, if it is one of those counted in `claims`.
        """
        task = current_backward()
        if task != self._task:
            self.end()
            self._task = task
        brought = self._brought
        # If a backward function wrote to it, fetch it again.
        if brought is None or version_of(brought) != self._brought_version:
            with out_of_sight():
                brought = self._stored.get()
            self._brought_version = version_of(brought)
        if claim is not None and claim.task != task:
            claim.task = task
            self._served += 1
        wanted = task != -1 and self._served < self.claims
        self._brought = brought if wanted else None
        return brought

    def release(self, claim: DepositClaim) -> None:
        """Decrement the number of claims.

        Finalizers call this at any point, so it takes no lock. Two threads may lose a
        count; the storage is then freed at the end of backward instead, or fetched
        again.
        """
        self.claims -= 1
        if claim.task == self._task and self._task != -1:
            self._served -= 1
        if self._served >= self.claims:
            self._brought = None

    def end(self) -> None:
        """Free the fetched storage at the end of a backward."""
        self._brought = None
        self._served = 0
        self._task = -1

    def settle(self) -> None:
        """Prepare for a write to the storage, after which it must not be shared.

        Needed because a write through `.data` bypasses the version counter.
        """
        self.is_current = False
        with out_of_sight():
            self._stored.settle()

    def drop(self) -> None:
        """Free everything."""
        self._brought = None
        self._stored.drop()

    def __del__(self) -> None:
        if self._address:
            free_weak_reference(self._address)
            self._stored.drop()


class _Register:
    """Finds existing deposits of storages."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[tuple[Tier, int], Deposit] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.RLock()

    def deposit(self, tier: Tier, tensor: Tensor) -> Deposit:
        key = tier, storage_address(tensor)
        with self._lock:
            known = self._known.get(key)
            if known is not None and known.matches(tensor):
                return known
            made = self._known[key] = Deposit(tier, tensor)
            return made


_REGISTER = _Register()


def deposit(tier: Tier, tensor: Tensor) -> Deposit:
    """Put a tensor's storage in a tier, unless it is there at the same version."""
    return _REGISTER.deposit(tier, tensor)

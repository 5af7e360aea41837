"""The protocol of tiers: put a storage there, and get it back."""

from abc import ABC, abstractmethod

from torch import Tensor

from recoup.errors import UsageError

SMALLEST_BYTES = 1 << 16
"""Storages below 64 KiB stay where they are: starting a copy takes a device about as
long as copying half a MiB, and there is little to win."""


class Stored(ABC):
    """One storage in a tier. The caller of `put` owns it, and drops it once.

    Regions call tiers out of the sight of dispatch modes and of autograd: what a tier
    computes is not recorded.
    """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The bytes it takes where it is kept."""

    @abstractmethod
    def get(self) -> Tensor:
        """Return the storage as it was put, one-dimensional, on its device.

        It may be asked for any number of times.

        Raises:
            ChangedTensorError: The storage was written to while it was being copied.
            TierError: It cannot be brought back.
        """

    @abstractmethod
    def drop(self) -> None:
        """Free it; a second call does nothing."""

    def prefetch(self) -> None:  # noqa: B027 (most tiers have nothing to begin)
        """Begin to bring it back, where that takes time."""

    def settle(self) -> None:  # noqa: B027 (most tiers have copied already)
        """Prepare for a write to the storage: what was put must be what is got."""


class Tier(ABC):
    """A place for the storages that regions keep between forward and backward.

    A tier is a value: it describes a place, two equal ones are the same place, and it
    may be made anew for every scope. It holds nothing; what is put in is held by what
    `put` returns.

    Implementations derive from `ExactTier` or `LossyTier`.
    """

    is_exact: bool
    """Whether everything comes back bit by bit."""

    @abstractmethod
    def takes(self, nbytes: int) -> bool:
        """Return whether a storage of so many bytes is worth putting here."""

    @abstractmethod
    def put(self, storage: Tensor, guard: Tensor | None = None) -> Stored:
        """Put a storage in.

        Args:
            storage: The whole storage, one-dimensional, in the type of its contents.
            guard: The tensor whose version shows whether somebody wrote to the
                storage; by default the storage itself.

        Raises:
            TierError: There is no room for it.
        """


class ExactTier(Tier):
    """A tier that returns every bit."""

    is_exact = True


class LossyTier(Tier):
    """A tier that returns something near what was put in.

    Gradients are then near those of the plain run. recoup never chooses one by itself.
    """

    is_exact = False


def check_sizes(**sizes: int) -> None:
    """Raise unless each of the sizes named is a number of bytes.

    Examples:
        >>> check_sizes(window_bytes=0)
    """
    for name, nbytes in sizes.items():
        if nbytes < 0:
            raise UsageError(f"expected {name} of at least 0 bytes, got {nbytes}.")

"""The protocol of tiers: put a storage in, and get it back."""

from abc import ABC, abstractmethod

from torch import Tensor

from recoup.errors import UsageError

SMALLEST_BYTES = 1 << 16
"""Storages below 64 KiB stay on the device: launching a copy takes about as long as
copying half a MiB, and there is little to gain."""


class Stored(ABC):
    """One storage in a tier. The caller of `put` owns it, and drops it once.

    Regions call tiers hidden from dispatch modes and autograd: a tier's operators are
    not recorded.
    """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The bytes it takes in the tier."""

    @abstractmethod
    def get(self) -> Tensor:
        """Return the storage as it was put, one-dimensional, on its device.

        May be called any number of times.

        Raises:
            ChangedTensorError: The storage was written to while it was being copied.
            TierError: It cannot be fetched.
        """

    @abstractmethod
    def drop(self) -> None:
        """Free it; a second call does nothing."""

    def prefetch(self) -> None:  # noqa: B027 (most tiers have nothing to begin)
        """Start fetching it, if that takes time."""

    def settle(self) -> None:  # noqa: B027 (most tiers have copied already)
        """Prepare for a write to the storage, which must not affect `get`."""


class Tier(ABC):
    """A place for the storages that regions keep between forward and backward.

    A tier is a value object: equal tiers are the same place, and every scope may have a
    new one. It holds nothing; the result of `put` holds the storage.

    Implementations derive from `ExactTier` or `LossyTier`.
    """

    is_exact: bool
    """Whether storages are returned bitwise."""

    @abstractmethod
    def takes(self, nbytes: int) -> bool:
        """Return whether a storage of `nbytes` is worth putting in this tier."""

    @abstractmethod
    def put(self, storage: Tensor, guard: Tensor | None = None) -> Stored:
        """Put a storage in.

        Args:
            storage: The whole storage, one-dimensional, in the dtype of its contents.
            guard: The tensor whose version shows writes to the storage; by default the
                storage itself.

        Raises:
            TierError: There is no room for it.
        """


class ExactTier(Tier):
    """A tier that returns every bit."""

    is_exact = True


class LossyTier(Tier):
    """A tier that returns an approximation of what was put in.

    Gradients are then approximate as well. recoup never chooses one on its own.
    """

    is_exact = False


def check_sizes(**sizes: int) -> None:
    """Raise unless each of the named sizes is non-negative.

    Examples:
        >>> check_sizes(window_bytes=0)
    """
    for name, nbytes in sizes.items():
        if nbytes < 0:
            raise UsageError(f"expected {name} of at least 0 bytes, got {nbytes}.")

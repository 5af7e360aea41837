"""Encoded storages, which are decoded when they are fetched."""

from collections.abc import Callable, Sequence

from torch import Tensor

from recoup.engine.tiers.protocol import Stored, Tier
from recoup.errors import UsageError


class Wrapper(Tier):
    """A tier that encodes storages and keeps the result on another one."""

    on: Tier
    smallest_bytes: int

    def takes(self, nbytes: int) -> bool:
        """Return whether a storage is large enough for this and the other tier."""
        return nbytes >= self.smallest_bytes and self.on.takes(nbytes)


class Coded(Stored):
    """A storage held as encoded tensors."""

    def __init__(
        self, on: Tier, parts: Sequence[Tensor], decode: Callable[..., Tensor]
    ) -> None:
        self._decode = decode
        self._parts: list[Stored] = []
        try:
            for part in parts:
                self._parts.append(on.put(part))
        except BaseException:
            self.drop()
            raise

    @property
    def nbytes(self) -> int:
        """The bytes of the parts."""
        return sum(part.nbytes for part in self._parts)

    def get(self) -> Tensor:
        """Fetch the parts and decode them."""
        return self._decode(*[part.get() for part in self._parts])

    def prefetch(self) -> None:
        """Start fetching the parts."""
        for part in self._parts:
            part.prefetch()

    def drop(self) -> None:
        """Free the parts."""
        for part in self._parts:
            part.drop()


def check_place(on: object, name: str) -> None:
    """Raise unless `on` is a tier."""
    if not isinstance(on, Tier):
        raise UsageError(f"expected another tier, as in {name}(Host()), got {on!r}.")


def in_blocks(storage: Tensor, length: int) -> Tensor:
    """Return a one-dimensional tensor as rows of `length`, padded with zeros.

    Examples:
        >>> import torch
        >>> in_blocks(torch.ones(3), 2)
        tensor([[1., 1.],
                [1., 0.]])
    """
    missing = -storage.numel() % length
    if missing:
        filled = storage.new_zeros(storage.numel() + missing)
        filled[: storage.numel()] = storage
        storage = filled
    return storage.view(-1, length)


def trimmed(tensor: Tensor, length: int) -> Tensor:
    """Return the first elements, on a storage without others."""
    return tensor if tensor.numel() == length else tensor[:length].clone()

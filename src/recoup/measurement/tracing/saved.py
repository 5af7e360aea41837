"""Count the bytes that autograd saves for backward, by unique storage."""

from collections.abc import Callable
from functools import partial
from operator import call
from typing import Self

from torch import Tensor, nn

from recoup.backend.autograd.saved_tensors import (
    Pack,
    Unpack,
    ambient_hooks,
    pop_hooks,
    push_hooks,
)
from recoup.backend.memory.ledger import StorageLedger, storages_in
from recoup.backend.memory.storages import alias, version_of
from recoup.errors import ChangedTensorError


class SavedBytes:
    """Count the tensors that autograd saves for backward inside the block.

    Each storage counts once, at the size it had when it was first saved, however many
    operators save it. A recoup region inside the block counts with what it holds for
    its replay. Nothing else changes: gradients, lifetimes, outer hooks, and the error
    for a saved tensor that was written to are those of the plain run.

    Args:
        existing: Tensors and modules that are not counted because they are alive
            anyway, usually the model.

    Attributes:
        tensors: The number of saved tensors, repeats included.

    Examples:
        >>> import torch
        >>> x = torch.ones(100, requires_grad=True)
        >>> with SavedBytes() as saved:
        ...     y = x.exp().sin()  # exp saves its result, sin its argument: the same
        >>> saved.bytes, saved.tensors
        (400, 2)
    """

    def __init__(self, *existing: Tensor | nn.Module) -> None:
        self.tensors = 0
        self._ledger = StorageLedger()
        self._existing = StorageLedger()
        self._around: tuple[Pack, Unpack] | None = None
        for storage in storages_in(existing):
            self._existing.add(storage)

    @property
    def bytes(self) -> int:
        """Bytes of all storages that were saved so far."""
        return self._ledger.total_bytes

    def __enter__(self) -> Self:
        # Hooks do not nest on their own: only the innermost run.
        self._around = ambient_hooks()
        push_hooks(self._pack, call)
        return self

    def __exit__(self, *exception: object) -> None:
        pop_hooks()
        self._around = None

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that returns the saved tensor."""
        self.tensors += 1
        for storage in storages_in(tensor):
            if not self._existing.refresh(storage):
                self._ledger.add(storage)
        if self._around is None:
            return KeptTensor(tensor).fetch
        pack, unpack = self._around
        return partial(unpack, pack(tensor))


class KeptTensor:
    """A saved tensor without its graph, and the version that was saved.

    With its graph, an operator that saves its own result would keep itself alive, in a
    reference cycle that no collector sees.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor if tensor.is_leaf else alias(tensor)
        self._version = version_of(tensor)

    def fetch(self) -> Tensor:
        """Return the tensor, after the version check that torch omits with hooks.

        Raises:
            ChangedTensorError: It was written to.
        """
        tensor, version = self._tensor, version_of(self._tensor)
        if version != self._version:
            raise ChangedTensorError(
                "one of the variables needed for gradient computation has been "
                f"modified by an inplace operation: {tensor.dtype} "
                f"{list(tensor.shape)} is at version {version}; expected version "
                f"{self._version} instead. Write to a copy, or after backward."
            )
        return tensor

"""Wrapped: what stands for a saved tensor that is made of others."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from recoup.backend.autograd.wrappers import Shell


class Wrapped:
    """Stands for a wrapper subclass that autograd saved, by its inner tensors.

    Args:
        tensor: The wrapper.
        pack: Returns what stands for an inner tensor.
    """

    __slots__ = ("__weakref__", "_names", "_shell")

    def __init__(self, tensor: Tensor, pack: Callable[[Tensor], Any]) -> None:
        self._shell = Shell(tensor)
        parts = self._shell.parts
        self._names = [name for name, part in parts.items() if isinstance(part, Tensor)]
        for name in self._names:
            parts[name] = pack(parts[name])

    def unpack(self, unpack: Callable[[Any], Tensor]) -> Tensor:
        """Return the wrapper, rebuilt from what its inner tensors are now.

        Args:
            unpack: Returns the inner tensor that something stands for.
        """
        parts = self._shell.parts
        found = {name: unpack(parts[name]) for name in self._names}
        return self._shell.around({**parts, **found})

"""Sets of tensors by identity that do not keep them alive."""

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class TensorSet:
    """A set of tensor objects; a tensor leaves it when it dies.

    Examples:
        >>> import torch
        >>> marked = TensorSet()
        >>> t = torch.ones(1)
        >>> marked.add(t)
        >>> t in marked, torch.ones(1) in marked, len(marked)
        (True, False, 1)
        >>> del t
        >>> len(marked)
        0
    """

    def __init__(self) -> None:
        self._members = WeakIdKeyDictionary()

    def add(self, tensor: Tensor) -> None:
        """Put a tensor in."""
        self._members[tensor] = None

    def discard(self, tensor: Tensor) -> None:
        """Take a tensor out, if it is in."""
        self._members.pop(tensor, None)

    def clear(self) -> None:
        """Take all out."""
        self._members.clear()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._members

    def __len__(self) -> int:
        return len(self._members)

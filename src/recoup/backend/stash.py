"""Put tensors of a device away on the host for a while, and back in their place."""

from collections.abc import Iterable

import torch
from torch import Tensor


class Stash:
    """Tensors whose memory is free until `restore`; they stay the same objects.

    Args:
        tensors: What to put away. Those on the processor stay where they are, and so
            do those whose memory cannot be given back.

    Examples:
        >>> Stash([torch.ones(2)]).restore()
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._away: list[tuple[torch.UntypedStorage, Tensor, Tensor]] = []
        storages = {
            id(tensor.untyped_storage()): (tensor, tensor.untyped_storage())
            for tensor in tensors
            if tensor.device.type != "cpu" and tensor.layout is torch.strided
        }
        for tensor, storage in storages.values():
            if storage.resizable():
                there = _bytes_of(tensor.device, storage)
                self._away.append((storage, there, there.cpu()))
                storage.resize_(0)

    def restore(self) -> None:
        """Bring everything back."""
        for storage, there, here in self._away:
            storage.resize_(here.nbytes)
            there.copy_(here)
        self._away = []


def _bytes_of(device: torch.device, storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

"""Offload the tensors that a compiled block saves for backward, and fetch them back.

Inputs, parameters and buffers of the block are not offloaded: they have other owners.
"""

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from recoup.backend.autograd.saved_tensors import is_parameter, out_of_sight
from recoup.backend.memory.storages import (
    geometry_of,
    has_storage,
    shaped,
    storage_address,
    version_of,
)
from recoup.backend.state.trees import tensors
from recoup.engine.tiers.deposits import deposit
from recoup.engine.tiers.host import Host
from recoup.errors import ChangedTensorError

HOST = Host()
"""The tier of everything that plans offload."""


def moving_saves(block: nn.Module, inputs: Any) -> saved_tensors_hooks:
    """Offload saved tensors in the block, except those with other owners."""
    others = {
        storage_address(tensor)
        for tensor in (*tensors(inputs), *block.buffers())
        if has_storage(tensor)
    }

    def pack(tensor: Tensor) -> "_Moved | _Kept":
        if (
            is_parameter(tensor)
            or not has_storage(tensor)
            or storage_address(tensor) in others
            or not HOST.takes(tensor.untyped_storage().nbytes())
        ):
            return _Kept(tensor)
        return _Moved(tensor)

    return saved_tensors_hooks(pack, _unpack)


def _unpack(packed: "_Moved | _Kept") -> Tensor:
    return packed.get()


class _Kept:
    """A saved tensor that stays, and its version: hooks disable torch's check."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = version_of(tensor)

    def get(self) -> Tensor:
        if version_of(self._tensor) != self._version:
            raise ChangedTensorError(
                f"expected the {tuple(self._tensor.shape)} tensor that a block saved "
                "as it was in forward, got one that was written to since; write to it "
                "after backward."
            )
        return self._tensor


class _Moved:
    """A saved tensor whose storage is on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.task = -1
        self._geometry = geometry_of(tensor)
        self._deposit = deposit(HOST, tensor)
        self._deposit.claims += 1

    def get(self) -> Tensor:
        with out_of_sight():
            return shaped(self._deposit.fetch(self), self._geometry)

    def __del__(self) -> None:
        if "_deposit" in vars(self):
            self._deposit.release(self)

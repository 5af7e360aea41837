"""Exact counters that share no code with what they check: operators, saved, alive."""

from collections import Counter
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


class Watching(TorchDispatchMode):
    """A dispatch mode that loads nothing when it is first used.

    By default PyTorch loads its compiler then, from inside the first operator, and
    reference cycles of that import keep the operator's arguments alive.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Operators(Watching):
    """Writes down the name of every operator that runs, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(func).removeprefix("aten."))
        return func(*args, **(kwargs or {}))

    @property
    def counts(self) -> Counter[str]:
        """How often each operator ran, without its overload."""
        return Counter(name.split(".")[0] for name in self.names)


class Alive(Watching):
    """Knows which of the storages that operators made are alive, by weak reference."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage._cdata not in given and storage.device.type != "meta":
                entry = StorageWeakRef(storage), storage.nbytes()
                self._made[storage._cdata] = entry
        return out

    @property
    def sizes(self) -> list[int]:
        """The bytes of every living storage, smallest first."""
        return sorted(size for ref, size in self._made.values() if not ref.expired())

    @property
    def total_bytes(self) -> int:
        """The bytes of all living storages."""
        return sum(self.sizes)


class Peak(Alive):
    """Knows the most bytes that were alive at once after an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        # Without the dead ones: every operator asks for the sum.
        made = self._made.items()
        self._made = {key: entry for key, entry in made if not entry[0].expired()}
        self.peak_bytes = max(self.peak_bytes, self.total_bytes)
        return out


class SavedByAutograd:
    """Counts the unique storages that autograd saves in the block, holding them."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def bytes_without(self, *tensors: Tensor) -> int:
        """Return the bytes saved, leaving out those of the tensors given."""
        known = {tensor.untyped_storage()._cdata for tensor in tensors}
        return sum(s.nbytes() for a, s in self._storages.items() if a not in known)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage
        return tensor


def flops_of(step: Any) -> int:
    """Return the floating-point operations of a call, counted by PyTorch."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [
        leaf.untyped_storage()
        for leaf in pytree.tree_leaves(tree)
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided
    ]

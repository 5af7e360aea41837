"""Watch from outside: saved bytes, freed memory, replayed operators, graphs."""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recoup.checkpointing import is_recomputing

CPU_STATE_BYTES = 5056
"""The bytes of one state of the CPU generator (Mersenne Twister)."""


def saved_bytes(run: Callable[[], Any], *without: Tensor) -> int:
    """Count the bytes that autograd saves in a call, every storage once.

    Holds the saved tensors while it counts, so that no address is used twice.

    Args:
        run: The call.
        without: Tensors that are not counted.
    """
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        # Detached: an operator's own output, packed as it is, would be a cycle.
        alias = storages[tensor.untyped_storage()._cdata] = tensor.detach()
        return alias

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    for tensor in without:
        storages.pop(tensor.untyped_storage()._cdata, None)
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


class Memory:
    """The memory of a tensor, watched without keeping it."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())

    @property
    def is_freed(self) -> bool:
        """Whether it is gone, whatever has become of the tensor."""
        return self._storage() is None


class Replayed(TorchDispatchMode):
    """Count the operators that run while recoup says it is recomputing."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Views are no arithmetic, and how a replay makes them is its own business.
        if is_recomputing() and not func.is_view:
            self.operators[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        """How many operators were replayed."""
        return self.operators.total()


class CountingBackend:
    """A backend for torch.compile that runs graphs as they are, and counts."""

    def __init__(self) -> None:
        self.compiled = 0
        self.ran = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.ran += 1
            return graph(*args)

        return run

    @property
    def counts(self) -> tuple[int, int]:
        """How many graphs were compiled, and how many times one was run."""
        return self.compiled, self.ran

"""Observe operators below autograd as they run."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor})


class OperatorMode(TorchDispatchMode):
    """A dispatch mode that sees operators, higher-order ones too, at low cost."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would wrap every call in a second one that costs more than the call.
        return False


def all_plain(types: tuple[type, ...]) -> bool:
    """Return whether tensors of these types are plain memory with a storage."""
    return all(kind in _PLAIN for kind in types)

"""Observe operators below autograd as they run."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_CONTROL_FLOW = frozenset(
    {
        ("torch._higher_order_ops.utils", "_hop_compile_and_call"),
        # torch 2.11 has no such function:
        ("torch._higher_order_ops.utils", "_maybe_compile_and_run_fn"),
        ("torch._higher_order_ops.cond", "cond"),
        ("torch._higher_order_ops.while_loop", "while_loop"),
        ("torch.nn.attention.flex_attention", "flex_attention"),
    }
)
_FRAMES = 16

_PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor})


class OperatorMode(TorchDispatchMode):
    """A low-overhead dispatch mode that also sees higher-order operators."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would wrap every call in another one that costs more than the call.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return whether the compiler may run under the mode: only for control flow.

        `torch.cond` and similar operators compile their functions even in eager mode,
        fail if they cannot, and reach the mode as one operator. Any other compiled
        function runs uncompiled, so that the mode sees its operators.
        """
        frame = sys._getframe(1)
        if frame.f_code.co_name == "__enter__":  # called once per region
            return False
        for _ in range(_FRAMES):
            if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _CONTROL_FLOW:
                return True
            if frame.f_back is None:
                break
            frame = frame.f_back
        return False


def all_plain(types: tuple[type, ...]) -> bool:
    """Return whether tensors of these types are all backed by a plain storage."""
    return _PLAIN.issuperset(types)


def copy_unseen(tensor: Tensor) -> Tensor:
    """Return a CPU copy, hidden from dispatch modes.

    Examples:
        >>> copy_unseen(torch.ones(2))
        tensor([1., 1.])
    """
    with torch._C._DisableTorchDispatch():
        return tensor.detach().to("cpu", copy=True)


def run_complex(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator inside a mode as it would run outside.

    Inside a mode torch keeps lazy conjugation and negation disabled, so kernels that
    create such views internally (`linalg.pinv`) would lose them.
    """
    with (
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.Conjugate, False),
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.Negative, False),
    ):
        return operator(*args, **kwargs)

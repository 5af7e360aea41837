"""Bindings: the fastest way to call an operator."""

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

_FUNCTIONS: Any = torch._C._VariableFunctions
_NEURAL: Any = torch._C._nn
_METHODS: Any = torch._C.TensorBase

_BOUND: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(_FUNCTIONS, name.removeprefix("aten::").split(".")[0])
        for name in (
            "aten::_log_softmax",
            "aten::_scaled_dot_product_efficient_attention",
            "aten::_scaled_dot_product_flash_attention",
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_softmax",
            "aten::add.Tensor",
            "aten::addmm",
            "aten::bmm",
            "aten::detach",
            "aten::div.Tensor",
            "aten::embedding",
            "aten::mm",
            "aten::mul.Tensor",
            "aten::native_layer_norm",
            "aten::relu",
            "aten::rsqrt",
            "aten::sigmoid",
            "aten::sub.Tensor",
            "aten::t",
            "aten::tanh",
            "aten::transpose.int",
            "aten::unbind.int",
            "aten::unsqueeze",
        )
    },
    "aten::expand": _METHODS.expand,
    "aten::gelu": _NEURAL.gelu,
    "aten::permute": _METHODS.permute,
    "aten::silu": _NEURAL.silu,
    "aten::view": _METHODS.view,
}


def binding_of(operator: Any) -> Callable[..., Any]:
    """Return what calls exactly this operator with the least parsing of arguments.

    An operator object reads its arguments by the schema, one by one. The functions that
    PyTorch generates for Python take half the time; but they choose among overloads by
    what they are given. Those of common operators are used where no argument that the
    operator can get leads to another one.

    Examples:
        >>> binding_of(torch.ops.aten.t.default) is torch.t
        True
        >>> binding_of(torch.ops.aten.sum.default) is torch.sum
        False
    """
    if not isinstance(operator, OpOverload):
        return operator
    return _BOUND.get(operator.name(), operator._op)

"""Wrapper subclasses as other libraries make them."""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class Int8Weight(Tensor):
    """A weight in eight bits with a scale for each row, as quantizing libraries do."""

    @staticmethod
    def __new__(cls: Any, data: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.data_int8 = data
        self.scale = scale

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_int8", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> "Int8Weight":
        return Int8Weight(inner["data_int8"], inner["scale"])

    def dequantized(self) -> Tensor:
        return self.data_int8.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_int8, args[0].scale)
        plain = pytree.tree_map_only(cls, cls.dequantized, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class Silent(Tensor):
    """A wrapper that does not say what it is made of."""

    @staticmethod
    def __new__(cls: Any, held: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, requires_grad=held.requires_grad
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = pytree.tree_map_only(cls, lambda t: t.held, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        return pytree.tree_map_only(Tensor, cls, out)


class LowRank(nn.Module):
    """A frozen quantized linear layer with a trained correction of low rank."""

    def __init__(self, width: int, rank: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            Int8Weight.of(torch.randn(width, width)), requires_grad=False
        )
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) + self.up(self.down(x))

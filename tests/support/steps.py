"""Small models that are hard to recompute, and one training step of them."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.twin import leftovers, tree_differences
from tests.support.variants import fixed_weights, tensors

Call = Callable[..., Any]


class Mlp(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(functional.gelu(self.widen(x)))


class Block(nn.Module):
    """A transformer block: attention and an MLP, each with dropout and a residual."""

    def __init__(self, width: int = 16, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(width)
        self.second_norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = Mlp(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        mixed = self.mix(self.first_norm(x)).view(batch, length, 3, 2, width // 2)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        x = x + self.dropout(self.project(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.second_norm(x)))


class Residual(nn.Module):
    """A convolution with BatchNorm and a residual, in place where people do so."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(self.convolution(x)) + x)


class Split(nn.Module):
    """Three views of one storage, all of them saved."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.mix = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.mix(x).chunk(3, dim=-1)
        return (first * second).exp() * third.sin()


def problems() -> dict[str, tuple[Any, Tensor]]:
    """Make every model with an input for it; the same ones each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return {
            "mlp": (Mlp(), torch.randn(8, 16)),
            "attention": (Block(dropout=0.1), torch.randn(2, 8, 16)),
            "residual": (Residual(), torch.randn(2, 4, 6, 6)),
            "views": (Split(), torch.randn(8, 16)),
            "recurrent": (nn.LSTM(8, 8, num_layers=2), torch.randn(5, 2, 8)),
        }


def step(model: nn.Module, call: Call, *inputs: Tensor) -> dict[str, Any]:
    """Train a copy of a model for one step and return everything it left behind.

    Args:
        model: What to train.
        call: Called as `call(model, *inputs)` for the forward.
        *inputs: The inputs; their gradients are wanted too.
    """
    model = copy.deepcopy(model)
    given = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    torch.manual_seed(1)
    result = call(model, *given)
    outputs = tensors(result)
    torch.autograd.backward(outputs, fixed_weights(outputs))
    return {
        "outputs": [output.detach() for output in outputs],
        "input gradients": [tensor.grad for tensor in given],
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
        "generator": torch.get_rng_state(),
        "left behind": list(leftovers()),
    }


def plain_call(model: nn.Module, *inputs: Tensor) -> Any:
    """Call a model as it is."""
    return model(*inputs)


def step_differences(model: nn.Module, call: Call, *inputs: Tensor) -> list[str]:
    """List how a step with `call` differs from the plain one; empty when equal."""
    expected = step(model, plain_call, *inputs)
    return list(tree_differences(expected, step(model, call, *inputs), where=""))


def gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Return the gradient of a function's result, weighted by fixed numbers."""
    given = at.detach().clone().requires_grad_()
    out = function(given)
    out.backward(fixed_weights([out])[0])
    assert given.grad is not None
    return given.grad

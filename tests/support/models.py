"""Small models that open regions around their parts, and steps that train them.

Every model takes a region factory as its second argument, so that the same code runs
plainly and under test. Regions come from the factory alone.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.twin import Region, Step


class Perceptron(nn.Module):
    """Linear layers with a region around each hidden layer."""

    def __init__(self, widths: Sequence[int] = (8, 16, 16, 4)) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)

    def forward(self, x: Tensor, region: Region) -> Tensor:
        for number, layer in enumerate(self.layers[:-1]):
            with region(f"layer {number}"):
                x = functional.gelu(layer(x))
        return self.layers[-1](x)


class Residual(nn.Module):
    """A residual block of convolutions, batch normalisation and in-place ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        y += x
        return self.relu(y)


class ResidualNetwork(nn.Module):
    """A stem, residual blocks with a region around each, and a head."""

    def __init__(self, channels: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(blocks))
        self.head = nn.Linear(channels, 4)

    def forward(self, x: Tensor, region: Region) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            with region(f"block {number}"):
                x = block(x)
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """A transformer block: causal attention and a perceptron, each after a norm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._drop(self._attend(self.attention_norm(x)))
        return x + self._drop(self.down(functional.gelu(self.up(self.norm(x)))))

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        query, key, value = (
            part.view(shape).transpose(1, 2)
            for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        rate = self.dropout if self.training else 0.0
        found = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=rate, is_causal=True
        )
        return self.projection(found.transpose(1, 2).reshape(batch, length, width))

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training) if self.dropout else x


class Transformer(nn.Module):
    """A GPT with a region around each block and a head tied to the embedding."""

    def __init__(
        self,
        *,
        width: int = 16,
        heads: int = 2,
        blocks: int = 2,
        words: int = 11,
        length: int = 8,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(length, width) / 10)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, region: Region) -> Tensor:
        x = self.words(tokens) + self.places
        for number, block in enumerate(self.blocks):
            with region(f"block {number}"):
                x = block(x)
        return self.norm(x) @ self.words.weight.T


class Recurrent(nn.Module):
    """Two recurrent layers with dropout between them, in one region, and a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = getattr(nn, kind)(6, 8, num_layers=2, dropout=0.5)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, region: Region) -> Tensor:
        with region("recurrent"):
            x, _ = self.layers(x)
        return self.head(x[-1])


class Shared(nn.Module):
    """One layer used three times, each time in a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, region: Region) -> Tensor:
        for number in range(3):
            with region(f"use {number}"):
                x = torch.tanh(self.layer(x))
        return x


class Normalised(nn.Module):
    """A layer under spectral normalisation, applied twice before any backward.

    Every application moves the power iteration's vectors in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x: Tensor, region: Region) -> Tensor:
        with region("first"):
            x = torch.tanh(self.layer(x))
        with region("second"):
            return torch.tanh(self.layer(x))


@dataclass(frozen=True)
class Problem:
    """A model and what it is fed."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]


def _tokens() -> Tensor:
    return torch.randint(11, (2, 8))


PROBLEMS: dict[str, Problem] = {
    "perceptron": Problem(Perceptron, lambda: torch.randn(5, 8)),
    "residual network": Problem(ResidualNetwork, lambda: torch.randn(2, 3, 6, 6)),
    "transformer": Problem(Transformer, _tokens),
    "lstm": Problem(lambda: Recurrent("LSTM"), lambda: torch.randn(5, 2, 6)),
    "gru": Problem(lambda: Recurrent("GRU"), lambda: torch.randn(5, 2, 6)),
    "rnn": Problem(lambda: Recurrent("RNN"), lambda: torch.randn(5, 2, 6)),
    "shared weights": Problem(Shared, lambda: torch.randn(5, 8)),
    "spectral norm": Problem(Normalised, lambda: torch.randn(5, 8)),
}


def training(
    problem: Problem,
    *,
    steps: int = 1,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    prepare: Callable[[nn.Module], Any] = lambda model: None,
    precision: torch.dtype | None = None,
    inputs_require_grad: bool = False,
) -> Step:
    """Return a step that trains a fresh model and shows all that came of it."""

    def step(region: Region) -> dict[str, Any]:
        model = problem.model()
        prepare(model)
        inputs = problem.inputs()
        if inputs_require_grad:
            inputs.requires_grad_()
        trained = [p for p in model.parameters() if p.requires_grad]
        update = optimizer(trained) if optimizer else None
        losses = []
        for _ in range(steps):
            for parameter in trained:
                parameter.grad = None
            with torch.autocast("cpu", precision, enabled=precision is not None):
                loss = model(inputs, region).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
            if update is not None:
                update.step()
        return {
            "losses": losses,
            "gradients": [parameter.grad for parameter in model.parameters()],
            "input gradient": inputs.grad,
            "state": {name: t.detach() for name, t in model.state_dict().items()},
        }

    return step

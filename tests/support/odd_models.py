"""Models that are built or called in unusual ways."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Perceptron(nn.Module):
    """Two layers and a norm, added to the input."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(functional.gelu(self.widen(self.norm(x))))


class Shared(nn.Module):
    """One block, called six times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Perceptron()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = self.block(x)
        return x


def leaves() -> nn.Module:
    """Return one long sequence of single layers."""
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [
            nn.Linear(16, 48),
            nn.ReLU(inplace=True),
            nn.Linear(48, 16),
            nn.Tanh(),
        ]
    return nn.Sequential(*layers)


class Backwards(nn.Module):
    """Blocks that are called in another order than they are listed in."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Perceptron() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


def frozen() -> nn.Module:
    """Return blocks of which the first half is not trained."""
    parts = [Perceptron() for _ in range(6)]
    for block in parts[:3]:
        block.requires_grad_(False)
    return nn.Sequential(*parts)


def frozen_within() -> nn.Module:
    """Return blocks of which every second layer is not trained."""
    model = nn.Sequential(*(Perceptron() for _ in range(6)))
    for block in model:
        block.get_submodule("widen").requires_grad_(False)
    return model


class Checkpointed(nn.Module):
    """Blocks that are under torch's own checkpointing already."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Perceptron() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if number % 2 else block(x)
        return x


class Counting(nn.Module):
    """Blocks that keep an average of what they saw in a buffer, and use it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Averaging() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Averaging(nn.Module):
    average: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = Perceptron()
        self.register_buffer("average", torch.zeros(16))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count += 1
            self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.inner(x - self.average)


class Pair(NamedTuple):
    hidden: Tensor
    extra: Tensor


@dataclass
class Output:
    hidden: Tensor
    extras: list[Tensor]


class Paired(nn.Module):
    """Blocks that take and return tuples, in a model that returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PairBlock() for _ in range(6))

    def forward(self, x: Tensor) -> Output:
        pair, extras = Pair(x, x), []
        for block in self.blocks:
            pair = block(pair)
            extras.append(pair.extra.mean())
        return Output(pair.hidden, extras)


class PairBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Perceptron()

    def forward(self, pair: Pair) -> Pair:
        hidden = self.inner(pair.hidden + pair.extra)
        return Pair(hidden, torch.tanh(pair.extra))


def paired_loss(output: Output) -> Tensor:
    return output.hidden.square().mean() + torch.stack(output.extras).sum()


class Tied(nn.Module):
    """Blocks of which each uses the weights of the first, and its transposes."""

    def __init__(self) -> None:
        super().__init__()
        first, *others = [Perceptron() for _ in range(6)]
        for block in others:
            block.widen.weight = first.widen.weight
        self.blocks = nn.ModuleList([first, *others])
        self.weight = first.widen.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return functional.linear(x, self.weight.T @ self.weight)


class Autocast(nn.Module):
    """Blocks under autocast, with one that switches it off."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Perceptron() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for block in self.blocks[:3]:
                x = block(x)
            with torch.autocast("cpu", enabled=False):
                x = self.blocks[3](x.float())
            for block in self.blocks[4:]:
                x = block(x)
        return x.float()


class Nested(nn.Module):
    """Blocks inside blocks, some called inside others."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(
            nn.Sequential(Perceptron(), Perceptron()) for _ in range(3)
        )
        self.singles = nn.ModuleList(Perceptron() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for pair, single in zip(self.pairs, self.singles, strict=True):
            x = pair(x) + single(x)
        return x


class Skipping(nn.Module):
    """Blocks some of which are left out, as the numbers say."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Perceptron() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if float(torch.rand(())) > 0.3:
                x = block(x)
        return x


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, y = ctx.saved_tensors
        return grad * 2 + 0 * (x + y)


class Custom(nn.Module):
    """Blocks with a function of the user's own, and a write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Perceptron() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = Double.apply(block(x)) / 2
            x[:, :2] *= 0.5
            x = x.sin_()
        return x


class Single(nn.Module):
    """No modules inside at all: parameters and functions."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(16, 16) / 4) for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


@dataclass(frozen=True)
class Odd:
    """A model, its loss, and a budget that it can be fitted to.

    Attributes:
        make: Makes the model.
        loss: Makes the loss of its output.
        share: The budget, as a share of the plain peak.
    """

    make: Callable[[], nn.Module]
    loss: Callable[[Any], Tensor] = mean_square
    share: float = 0.7


ODD = {
    "one block called again": Odd(Shared),
    "a sequence of single layers": Odd(leaves),
    "called in reverse": Odd(Backwards),
    "half frozen": Odd(frozen),
    "frozen within": Odd(frozen_within),
    "torch's checkpointing inside": Odd(Checkpointed),
    "averages in buffers": Odd(Counting),
    "tuples and a dataclass": Odd(Paired, paired_loss),
    "tied weights": Odd(Tied),
    "autocast": Odd(Autocast),
    "blocks in blocks": Odd(Nested),
    "functions of its own": Odd(Custom),
    "no modules inside": Odd(Single, share=0.9),
    "blocks left out at random": Odd(Skipping, share=0.9),
}


def odd_batch() -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return torch.randn(64, 16)

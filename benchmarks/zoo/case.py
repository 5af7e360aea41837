"""What a model of the zoo is: how it is built, fed, and judged."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Scale = Literal["tiny", "large"]
Pair = tuple[Any, Tensor]
"""What a model is called with, and the target of its loss."""


@dataclass(frozen=True)
class Case:
    """A model with a batch to train it on.

    Attributes:
        name: What tables and tests call it.
        make: Makes the model for a scale.
        feed: Makes a batch for a scale, on the default device.
        loss: Takes what the model returns, and the target.
    """

    name: str
    make: Callable[[Scale], nn.Module]
    feed: Callable[[Scale], Pair]
    loss: Callable[[Any, Tensor], Tensor]

    def build(
        self,
        scale: Scale,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> nn.Module:
        """Return the model, always with the same parameters."""
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(0)
            return self.make(scale).to(dtype=dtype)

    def batch(
        self,
        scale: Scale,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Pair:
        """Return a batch, always the same."""
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(1)
            inputs, target = self.feed(scale)
        return cast(inputs, dtype), target


def cast(inputs: Any, dtype: torch.dtype) -> Any:
    """Return the inputs with their numbers of another type; indices stay."""
    if isinstance(inputs, tuple):
        return tuple(cast(part, dtype) for part in inputs)
    if isinstance(inputs, dict):
        return {name: cast(part, dtype) for name, part in inputs.items()}
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over all positions."""
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())

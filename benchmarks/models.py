"""The models that are measured, with a batch to train them on."""

from dataclasses import dataclass

import torch
from torch import Tensor

from recoup.cli.gpt import GPT, RunBlock, Shape

LARGE = Shape(layers=24, width=2048, heads=16, vocabulary=50304, context=1024)
"""1.4 billion parameters: on one GPU the arithmetic hides the host."""

WIDE = Shape(layers=24, width=4096, heads=32, vocabulary=50304, context=1024)
"""5.2 billion parameters: twice the arithmetic of `LARGE` for every byte saved."""

MEDIUM = Shape(layers=4, width=256, heads=4, vocabulary=1024, context=128)
"""Small enough for a CPU, large enough to look like a transformer."""

TINY = Shape(layers=8, width=32, heads=2, vocabulary=64, context=8)
"""Operators so small that nearly all the time is the host's."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A model and one batch."""

    model: GPT
    tokens: Tensor
    targets: Tensor

    @staticmethod
    def make(
        shape: Shape, batch: int, *, device: torch.device, dtype: torch.dtype
    ) -> "Problem":
        """Make a model and a batch of full contexts from a fixed seed."""
        torch.manual_seed(0)
        with device:
            model = GPT(shape).to(dtype)
        tokens = torch.randint(shape.vocabulary, (2, batch, shape.context))
        return Problem(model, *tokens.to(device))

    def loss(self, run_block: RunBlock) -> Tensor:
        return self.model(self.tokens, self.targets, run_block)

    def clear_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        found = [parameter.grad for parameter in self.model.parameters()]
        return [gradient for gradient in found if gradient is not None]

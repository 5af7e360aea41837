"""PyTorch's own ways to spend time for memory, put around the blocks of a model."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from recoup.engine.blocks import block_names
from recoup.measure.peers import PEERS, Context, plain

__all__ = ["PEERS", "Compiled", "Context", "plain"]


class Compiled:
    """Blocks compiled with a budget for what they save.

    Args:
        model: The model, whose blocks are compiled on first use and reused after.
        budget: The share of what they would save that torch's partitioner may save.
    """

    def __init__(self, model: nn.Module, budget: float) -> None:
        self._budget = budget
        self._forwards = {
            name: torch.compile(model.get_submodule(name).forward, dynamic=False)
            for name in block_names(model)
        }

    @contextmanager
    def __call__(self, model: nn.Module) -> Iterator[None]:
        from torch._functorch import config

        with ExitStack() as stack:
            for name, forward in self._forwards.items():
                module = model.get_submodule(name)
                module.__dict__["forward"] = forward
                stack.callback(module.__dict__.pop, "forward")
            with config.patch(activation_memory_budget=self._budget):
                yield

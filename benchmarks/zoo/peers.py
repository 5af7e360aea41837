"""PyTorch's own ways to spend time for memory, put around the blocks of a model."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, MethodType

import torch
from torch import nn

from recoup.backend.compiler.partitioning import with_own_code
from recoup.engine.applied.model_blocks import block_names
from recoup.fitting.benchmark import PEERS, Context

__all__ = ["PEERS", "Compiled", "Context"]


RECOMPILE_LIMIT = 64
"""How many shapes of one block are compiled; past it torch would run it uncompiled."""


class Compiled:
    """Blocks compiled with a budget for what they save.

    Args:
        model: The model, whose blocks are compiled on first use and reused after.
        budget: The share of what they would save that torch's partitioner may save.
    """

    def __init__(self, model: nn.Module, budget: float) -> None:
        self._budget = budget
        own = _Copies(f"with_budget_{round(100 * budget)}_percent")
        blocks = {name: model.get_submodule(name) for name in block_names(model)}
        self._forwards = {
            name: torch.compile(own.forward_of(block), dynamic=False)
            for name, block in blocks.items()
        }

    @contextmanager
    def __call__(self, model: nn.Module) -> Iterator[None]:
        import torch._dynamo.config as dynamo
        from torch._functorch import config

        with ExitStack() as stack:
            for name, forward in self._forwards.items():
                module = model.get_submodule(name)
                module.__dict__["forward"] = forward
                stack.callback(module.__dict__.pop, "forward")
            stack.enter_context(config.patch(activation_memory_budget=self._budget))
            stack.enter_context(
                dynamo.patch(
                    recompile_limit=RECOMPILE_LIMIT,
                    accumulated_recompile_limit=RECOMPILE_LIMIT,
                )
            )
            yield


class _Copies:
    """Copies of functions, one of each, that torch compiles apart from the originals.

    It looks for what it has compiled by a function's code, whatever the budget: two
    contenders with the same code would both run what was compiled for one of them.
    """

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._copies: dict[FunctionType, FunctionType] = {}

    def forward_of(self, module: nn.Module) -> MethodType:
        """Return the forward of a module, bound to it."""
        function = type(module).forward
        assert isinstance(function, FunctionType), "written in Python"
        if function not in self._copies:
            self._copies[function] = with_own_code(function, self._suffix)
        return MethodType(self._copies[function], module)

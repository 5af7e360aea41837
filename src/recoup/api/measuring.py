"""measure: one training step as a graph."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recoup.core.graph import Graph
from recoup.measure.floor import measure_floor
from recoup.measure.training import training_step, untouched


def measure(
    model: nn.Module,
    batch: Any = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    step: Callable[[], object] | None = None,
    blocks: Sequence[str] | None = None,
    device: torch.device | str | None = None,
) -> Graph:
    """Run a step at the least memory it can run in, and return its graph.

    The arguments are those of `fit`. The model is afterwards as it was before.

    Costs four steps.

    Examples:
        >>> graph = measure(nn.Linear(4, 4), torch.ones(2, 4), loss=Tensor.sum)
        >>> [operation.name for operation in graph.operations]
        ['aten.addmm.default', 'aten.sum.default', 'aten.ones_like.default']
    """
    described = training_step(model, batch, loss=loss, step=step, device=device)
    with untouched(model):
        return measure_floor(described, names=blocks)

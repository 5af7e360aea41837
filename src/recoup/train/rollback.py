"""Undo a step that must not count: random states and buffers as they were."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from recoup.backend.foreach import copy_all
from recoup.train.randomness import (
    RandomStates,
    random_states,
    restore_random_states,
)


class Rollback:
    """Remembers what a forward pass changes besides gradients, and puts it back.

    These are Python's and torch's random generators and the model's buffers, such as
    running statistics. NumPy's generator is left alone: no module of torch draws from
    it, and reading it takes longer than all the rest. Costs one copy of the buffers,
    kept, and a few kernels a step.

    Examples:
        >>> norm = nn.BatchNorm1d(2)
        >>> rollback = Rollback(norm, torch.device("cpu"))
        >>> rollback.remember()
        >>> _ = norm(torch.randn(8, 2) + 5)
        >>> rollback.restore()
        >>> norm.running_mean.tolist(), norm.num_batches_tracked.item()
        ([0.0, 0.0], 0)
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._states: RandomStates | None = None
        self._buffers: list[Tensor] = []
        self._copies: list[Tensor] = []

    def remember(self) -> None:
        """Take note of how things stand."""
        self._states = random_states(self._device, with_numpy=False)
        buffers = [
            buffer for buffer in self._model.buffers() if buffer.device.type != "meta"
        ]
        if not _same(buffers, self._buffers):
            self._buffers = buffers
            self._copies = [buffer.detach().clone() for buffer in buffers]
        else:
            _copy(self._buffers, to=self._copies)

    def restore(self) -> None:
        """Put everything back as it was at the last `remember`."""
        assert self._states is not None, "remembered before"
        restore_random_states(self._states, self._device)
        _copy(self._copies, to=self._buffers)


def _same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(
        one is other for one, other in zip(some, others, strict=True)
    )


def _copy(sources: list[Tensor], *, to: list[Tensor]) -> None:
    groups: defaultdict[Any, tuple[list[Tensor], list[Tensor]]] = defaultdict(
        lambda: ([], [])
    )
    for target, source in zip(to, sources, strict=True):
        targets, values = groups[target.dtype, target.device]
        targets.append(target)
        values.append(source)
    with torch.no_grad():
        for targets, values in groups.values():
            copy_all(targets, values)

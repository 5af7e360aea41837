"""Undo a step that must not count: random states and buffers as they were."""

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from recoup.backend.buffers import (
    BufferSlot,
    are_in_place,
    buffer_slots,
    buffers_of,
    put_in_place,
)
from recoup.backend.foreach import choose_all, copy_all
from recoup.backend.randomness import (
    RandomStates,
    random_states,
    restore_random_states,
    same_random_states,
)


class Rollback:
    """Remembers what a forward pass changes besides gradients, and puts it back.

    These are Python's and torch's random generators and the model's buffers, such as
    running statistics. NumPy's generator is left alone unless asked for: no module of
    torch draws from it, and reading it takes longer than all the rest. Costs one copy
    of the buffers, kept, and a few kernels a step.

    Args:
        model: The model.
        device: Where it computes.
        with_numpy: Whether NumPy's generator counts.

    Examples:
        >>> norm = nn.BatchNorm1d(2)
        >>> rollback = Rollback(norm, torch.device("cpu"))
        >>> rollback.remember()
        >>> _ = norm(torch.randn(8, 2) + 5)
        >>> rollback.restore()
        >>> norm.running_mean.tolist(), norm.num_batches_tracked.item()
        ([0.0, 0.0], 0)
    """

    def __init__(
        self, model: nn.Module, device: torch.device, *, with_numpy: bool = False
    ) -> None:
        self._model = model
        self._device = device
        self._with_numpy = with_numpy
        self._states: RandomStates | None = None
        self._slots: list[BufferSlot] = []
        self._buffers: list[Tensor] = []
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []

    def remember(self) -> None:
        """Take note of how things stand."""
        self._states = random_states(self._device, with_numpy=self._with_numpy)
        buffers = buffers_of(self._model)
        if not _same(buffers, self._buffers):
            self._buffers = buffers
            self._slots = buffer_slots(self._model.modules())
            self._groups = [
                (group, [buffer.detach().clone() for buffer in group])
                for group in _alike(buffers)
            ]
        elif buffers:
            with torch.no_grad():
                for group, copies in self._groups:
                    copy_all(copies, group)

    def restore(self) -> None:
        """Put everything back as it was at the last `remember`."""
        assert self._states is not None, "remembered before"
        restore_random_states(self._states, self._device)
        put_in_place(self._slots)
        with torch.no_grad():
            for group, copies in self._groups:
                copy_all(group, copies)

    def can_choose(self, device: torch.device) -> bool:
        """Return whether a device could put everything back by itself.

        No generator was drawn from since the last `remember`, and no buffer replaced by
        another tensor: hosts keep these.
        """
        assert self._states is not None, "remembered before"
        return (
            are_in_place(self._slots)
            and all(group[0].device == device for group, _ in self._groups)
            and same_random_states(self._states, self._device)
        )

    def choose(self, flag: Tensor) -> None:
        """Put buffers back if the flag is set on their device, without waiting."""
        with torch.no_grad():
            for group, copies in self._groups:
                choose_all(group, copies, flag)


def _same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _alike(buffers: list[Tensor]) -> list[list[Tensor]]:
    """Return the buffers that hold something, in groups of one type and device."""
    groups: defaultdict[Any, list[Tensor]] = defaultdict(list)
    for buffer in buffers:
        if buffer.device.type != "meta":
            groups[buffer.dtype, buffer.device].append(buffer)
    return list(groups.values())

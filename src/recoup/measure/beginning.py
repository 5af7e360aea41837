"""Where every run of a step begins, so that all of them are the same step."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recoup.backend.buffers import buffers_of
from recoup.backend.randomness import random_states, restore_random_states


class Beginning:
    """The random generators and buffers that runs of a step begin with.

    What a step does may depend on both: blocks that are left out at random, experts
    that are chosen by a bias in a buffer. A plan is made for one step and checked on
    another, so both have to be the same. Generators are those of Python, NumPy (if it
    has been imported), the CPU and the devices.

    Buffers begin as the first run left them: it may have set something up that later
    ones find done. The copies are on the host, where they take no memory of the step.

    Args:
        model: The model.
        devices: Where the step computes.

    Examples:
        >>> drop = nn.Dropout()
        >>> beginning = Beginning(drop, [])
        >>> drops = []
        >>> for _ in range(3):
        ...     beginning.next()
        ...     drops.append(drop(torch.ones(100)))
        >>> torch.equal(drops[0], drops[1]), torch.equal(drops[0], drops[2])
        (True, True)
    """

    def __init__(self, model: nn.Module, devices: Sequence[torch.device]) -> None:
        self._model = model
        self._devices = devices
        self._states = random_states(*devices)
        self._buffers = _copied(model)
        self._set_up: list[tuple[Tensor, Tensor]] | None = None
        self._runs = 0

    def next(self) -> None:
        """Make the next run begin where the others did."""
        if self._runs == 1:
            self._set_up = _copied(self._model)
        elif self._set_up is not None:
            _restore(self._set_up)
        self._runs += 1
        restore_random_states(self._states, *self._devices)

    def restore(self) -> None:
        """Put generators and buffers back as they were before the first run."""
        _restore(self._buffers)
        restore_random_states(self._states, *self._devices)


def _copied(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    return [(buffer, _copy(buffer.detach())) for buffer in buffers_of(model)]


def _copy(tensor: Tensor) -> Tensor:
    if type(tensor) is Tensor and not tensor.is_meta:
        return tensor.to("cpu", copy=True)
    return tensor.clone()


def _restore(copies: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, before in copies:
            buffer.copy_(before)

"""Where every run of a step begins, so that all of them are the same step."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recoup.backend.buffers import buffer_slots, buffers_in, put_in_place
from recoup.backend.randomness import random_states, restore_random_states
from recoup.backend.storages import version_of
from recoup.measure.writes import Writes


class Beginning:
    """The random generators and buffers that runs of a step begin with.

    What a step does may depend on both: blocks that are left out at random, experts
    that are chosen by a bias in a buffer. A plan is made for one step and checked on
    another, so both have to be the same. Generators are those of Python, NumPy (if it
    has been imported), the CPU and the devices.

    Buffers begin as the first run left them: it may have set something up that later
    ones find done. The copies are on the host, where they take no memory of the step.

    Args:
        modules: The model, and other modules that the step may change.
        devices: Where the step computes.
        batch: What the step is given; it may write to it.
        writes: Knows the parameters that the step writes to.

    Examples:
        >>> drop = nn.Dropout()
        >>> beginning = Beginning([drop], [])
        >>> drops = []
        >>> for _ in range(3):
        ...     beginning.next()
        ...     drops.append(drop(torch.ones(100)))
        >>> torch.equal(drops[0], drops[1]), torch.equal(drops[0], drops[2])
        (True, True)
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        devices: Sequence[torch.device],
        batch: Sequence[Tensor] = (),
        writes: Writes | None = None,
    ) -> None:
        self._modules = modules
        self._devices = devices
        self._states = random_states(*devices)
        self._buffers = _Buffers(modules)
        self._set_up: _Buffers | None = None
        self._batch = [_Given(tensor) for tensor in batch]
        self._writes = writes
        self._runs = 0

    def next(self, *, waiting: bool = True) -> None:
        """Make the next run begin where the others did.

        Args:
            waiting: False leaves the buffers as they are: to put them back, the host
                waits for an accelerator.
        """
        if not waiting:
            restore_random_states(self._states, *self._devices)
            return
        if self._runs == 1:
            self._set_up = _Buffers(self._modules)
        elif self._set_up is not None:
            self._set_up.restore()
        self._runs += 1
        self._restore_others()

    def restore(self) -> None:
        """Put all back as before the first run: generators, buffers, the batch."""
        self._buffers.restore()
        self._restore_others()

    def _restore_others(self) -> None:
        for content in self._batch:
            content.restore()
        if self._writes is not None:
            self._writes.restore()
        restore_random_states(self._states, *self._devices)


class _Given:
    """What is in a tensor of the batch, put back where it was written to.

    Only there: one that is expanded or made for inference cannot be written to at all.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = version_of(tensor)
        self._copy = _copy(tensor.detach())

    def restore(self) -> None:
        if version_of(self._tensor) != self._version:
            with torch.no_grad():
                self._tensor.copy_(self._copy)
            self._version = version_of(self._tensor)


class _Buffers:
    """The buffers of modules: which tensors they are, and what is in them.

    All are written to: batch normalisation changes them without a new version.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._slots = [slot for module in modules for slot in buffer_slots(module)]
        self._copies = [(b, _copy(b.detach())) for b in buffers_in(self._slots)]

    def restore(self) -> None:
        put_in_place(self._slots)
        with torch.no_grad():
            for buffer, before in self._copies:
                buffer.copy_(before)


def _copy(tensor: Tensor) -> Tensor:
    if type(tensor) is Tensor and not tensor.is_meta:
        return tensor.to("cpu", copy=True)
    return tensor.clone()

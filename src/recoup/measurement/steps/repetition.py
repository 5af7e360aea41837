"""Repetition: a step that runs several times begins alike and leaves no trace."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from recoup.backend.state.attributes import Numbers
from recoup.backend.state.snapshots import (
    Buffers,
    Gradients,
    StateSnapshot,
    WrittenTensors,
    takes_gradient,
)
from recoup.backend.state.walk import hooks_of, reach


class Repetition:
    """The state that the runs of one step begin with, and that is restored at the end.

    A plan is made for one step and checked on another, so both must be the same step:
    what it does may depend on random numbers (blocks that are left out), on buffers
    (experts that are chosen by a bias) and on counters (warm-up).

    Buffers and counters begin as the first run left them: it may have set something up
    that later runs find done. Copies of buffers are on the CPU, where they take no
    memory of the step. Tensors are copied only if the first run writes to them.

    Examples:
        >>> drop = nn.Dropout()
        >>> repetition = Repetition(drop, lambda: None)
        >>> drops = []
        >>> for _ in range(3):
        ...     repetition.begin()
        ...     drops.append(drop(torch.ones(100)))
        >>> torch.equal(drops[0], drops[1]), torch.equal(drops[0], drops[2])
        (True, True)
    """

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[], object],
        batch: Any = None,
        devices: Iterable[torch.device] = (),
    ) -> None:
        self._things = (model, run, batch)
        known: list[Tensor] = reach(*self._things, kind=Tensor)
        hooks = [hooks for tensor in known for hooks in hooks_of(tensor)]
        known += reach(*hooks, kind=Tensor)
        self._gradients = Gradients(filter(takes_gradient, known))
        self._before = StateSnapshot(
            *self._things, devices=devices, with_attributes=True, on_cpu=True
        )
        copied = set(map(id, self._before.buffers.tensors))
        self._written = WrittenTensors(t for t in known if id(t) not in copied)
        self._set_up: tuple[Buffers, Numbers] | None = None
        self._runs = 0

    def take_gradients(self) -> None:
        """Take the gradients off, until `restore`."""
        self._gradients.take_off()

    def watched(self, run: Callable[[], object]) -> Callable[[], object]:
        """Return the step as a function that watches what the first run writes."""

        def watched_run() -> object:
            with self._written.watched():
                return run()

        return watched_run

    def begin(self, *, waiting: bool = True) -> None:
        """Make the next run begin where the others did, without gradients.

        Args:
            waiting: False leaves the buffers and written tensors as they are: to
                restore them, the host waits for an accelerator.
        """
        self._gradients.drop()
        if waiting:
            if self._runs == 1:
                modules = self._before.modules
                buffers = Buffers(modules, on_cpu=True)
                self._set_up = buffers, Numbers(*self._things, *modules)
            elif self._set_up is not None:
                self._set_up[0].restore()
            self._runs += 1
            self._written.restore()
        if self._set_up is not None:
            self._set_up[1].restore()
        self._before.generators.restore()

    def drop_gradients(self) -> None:
        """Drop the gradients that a run has left."""
        self._gradients.drop()

    def carry_gradients(self) -> None:
        """Begin the next run with gradients, where runs have left some."""
        self._gradients.carry()

    def restore(self) -> None:
        """Restore everything as before the first run."""
        self._gradients.restore()
        self._before.restore()
        self._written.restore()

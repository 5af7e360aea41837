"""Optimizer steps that bypass the version counter, counted where it matters.

Fused optimizers, and those of other libraries, write to parameters without giving them
a new version. Plain autograd then uses the new weights without a word, and so would a
replay. While something waits for its backward, such a step counts as a write.
"""

from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from recoup.backend.memory.storages import version_of


class StepWatch:
    """Counts optimizer steps as writes while anything waits for its backward.

    Costs nothing while nothing waits. Else a step reads the version of each parameter
    twice, about a tenth of a microsecond each.
    """

    def __init__(self) -> None:
        self._waiting: set[int] = set()
        self._versions: dict[int, list[int]] = {}
        self._is_on = False

    def begin(self, waiter: object) -> None:
        """Watch from now on, until `end`; no other object may have this identity."""
        self._waiting.add(id(waiter))
        if not self._is_on:
            self._is_on = True
            register_optimizer_step_pre_hook(self._before)
            register_optimizer_step_post_hook(self._after)

    def end(self, waiter: object) -> None:
        """Stop watching for this one. Takes no lock: called when it dies."""
        self._waiting.discard(id(waiter))

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if self._waiting and not is_compiling():
            versions = [version_of(each) for each in _parameters(optimizer)]
            self._versions[id(optimizer)] = versions

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if is_compiling():
            return
        before = self._versions.pop(id(optimizer), None)
        parameters = _parameters(optimizer)
        if before is None or len(before) != len(parameters):
            return
        uncounted = [
            parameter
            for parameter, version in zip(parameters, before, strict=True)
            if parameter.grad is not None and version_of(parameter) == version >= 0
        ]
        if uncounted and self._waiting:
            increment_version(uncounted)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


STEPS = StepWatch()

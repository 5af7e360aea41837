"""The host's view of a scaler: its scale, and the outcomes of its steps."""

import ctypes
import math
from dataclasses import dataclass
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer

from recoup.errors import UsageError


@dataclass(slots=True)
class KnownScale:
    """A scale and its count of finite steps, updated as torch does on the device.

    Attributes:
        scale: The scale, a number of 32 bits.
        good_steps: Steps without overflow since it last changed.

    Examples:
        >>> known = KnownScale(8.0)
        >>> known.update(overflowed=True, growth=2.0, backoff=0.5, interval=1)
        >>> known.scale
        4.0
    """

    scale: float
    good_steps: int = 0

    def update(
        self, *, overflowed: bool, growth: float, backoff: float, interval: int
    ) -> None:
        """Update as `torch._amp_update_scale_` does, rounding included."""
        if overflowed:
            self.scale = _rounded(self.scale * backoff)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == interval:
            grown = _rounded(self.scale * growth)
            # As on the device: a scale that would become infinite is kept.
            if math.isfinite(grown):
                self.scale = grown
            self.good_steps = 0


def _rounded(number: float) -> float:
    return ctypes.c_float(number).value


@dataclass(slots=True)
class OptimizerOutcome:
    """The outcome of an optimizer's step: on the host, or on the device.

    Attributes:
        optimizer: The optimizer.
        skipped: Whether the step was skipped; a flag on the device, if only that knows.
    """

    optimizer: ref[Optimizer]
    skipped: bool | Tensor

    def was_skipped(self) -> bool:
        """Return whether it was skipped; synchronises if only the device knows."""
        self.skipped = bool(self.skipped)
        return self.skipped


class Outcomes:
    """The last step of each optimizer, until an iteration after it begins.

    Examples:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.ones(1)])
        >>> outcomes = Outcomes()
        >>> outcomes.add(optimizer, skipped=True)
        >>> [outcome.was_skipped() for outcome in outcomes.last(optimizer)]
        [True]
        >>> outcomes.overflowed(checked_optimizers=1)
        True
    """

    def __init__(self) -> None:
        self._found: dict[int, OptimizerOutcome] = {}
        self._iteration_is_over = False

    def __contains__(self, optimizer: Optimizer) -> bool:
        return id(optimizer) in self._found

    def add(self, optimizer: Optimizer, *, skipped: bool | Tensor) -> None:
        """Record a step."""
        self._found[id(optimizer)] = OptimizerOutcome(ref(optimizer), skipped)

    def discard(self, optimizer: Optimizer) -> None:
        """Forget the optimizer's last step, because another one begins."""
        self._found.pop(id(optimizer), None)

    def clear(self) -> None:
        """Forget all steps."""
        self._found.clear()

    def begin_step(self) -> None:
        """Begin a step; the first of an iteration ends the previous iteration."""
        if self._iteration_is_over:
            self.clear()
            self._iteration_is_over = False

    def end_iteration(self) -> None:
        """End the iteration."""
        self._iteration_is_over = True

    def last(self, optimizer: Optimizer | None) -> list[OptimizerOutcome]:
        """Return the last steps: of one optimizer, or of all."""
        chosen = [
            outcome
            for outcome in self._found.values()
            if optimizer is None or outcome.optimizer() is optimizer
        ]
        if not chosen:
            raise UsageError(
                "expected a step of that optimizer before step_was_skipped, but this "
                "scaler has taken none of that optimizer; call scaler.step(optimizer)."
            )
        return chosen

    def overflowed(self, checked_optimizers: int) -> bool | None:
        """Return whether a gradient overflowed in this iteration, if the host knows.

        Args:
            checked_optimizers: The number of optimizers whose gradients were checked.
                One that was unscaled and not stepped has no outcome.
        """
        if self._iteration_is_over:
            return None
        known = [outcome.skipped for outcome in self._found.values()]
        if any(skipped is True for skipped in known):
            return True
        if known and all(skipped is False for skipped in known):
            return False if len(known) == checked_optimizers else None
        return None

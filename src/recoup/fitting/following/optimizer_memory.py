"""State that optimizers make after `fit`, which did not reserve memory for it."""

import warnings
from collections.abc import Iterable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from recoup.backend.memory.ledger import storages_in
from recoup.backend.state.model_state import needs
from recoup.backend.state.trees import tensors
from recoup.backend.training.optimizer_steps import members_of
from recoup.core.callers import user_stacklevel
from recoup.core.units import print_bytes
from recoup.errors import BudgetWarning
from recoup.measurement.steps.training_step import device_of

_WATCHES: "WeakKeyDictionary[nn.Module, _OptimizerWatch]" = WeakKeyDictionary()


def watch_optimizers(
    model: nn.Module, known: Iterable[Optimizer], peak_bytes: int, budget_bytes: int
) -> None:
    """Warn once if the state that other optimizers make for a model does not fit.

    Looks at each optimizer at its first step. Costs one function call per step.

    Args:
        model: The model with the plan, or what contains the models.
        known: The optimizers whose state is in the peak.
        peak_bytes: The peak of a step with the plan.
        budget_bytes: The budget.
    """
    _follow_steps()
    _WATCHES[model] = _OptimizerWatch(model, known, peak_bytes, budget_bytes)


def forget_optimizers(model: nn.Module) -> None:
    """Stop watching: the plan was removed from the model."""
    _WATCHES.pop(model, None)


class _OptimizerWatch:
    """The optimizers that were seen to step, and the bytes of their new state."""

    def __init__(
        self,
        model: nn.Module,
        known: Iterable[Optimizer],
        peak_bytes: int,
        budget_bytes: int,
    ) -> None:
        self._is_process_wide = device_of(model).type != "cpu"
        self._budget_bytes = budget_bytes
        self._needed_bytes = peak_bytes
        # By optimizer: the bytes of its state before its first step; None: it is known.
        self._before: WeakKeyDictionary[Optimizer, int | None] = WeakKeyDictionary()
        for optimizer in known:
            for member in members_of(optimizer):
                self._before[member] = None

    def before(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Note the state that exists before the first step of an optimizer.

        An accelerator's allocator counted it when the plan was measured.
        """
        if optimizer not in self._before:
            is_counted = self._is_process_wide
            self._before[optimizer] = _state_bytes(model, optimizer) * is_counted

    def after(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Warn if the state that the first step of an optimizer made does not fit."""
        before_bytes = self._before.get(optimizer)
        if before_bytes is None:
            return
        self._before[optimizer] = None
        made_bytes = _state_bytes(model, optimizer) - before_bytes
        if made_bytes <= 0:
            return
        had_room = self._needed_bytes <= self._budget_bytes
        self._needed_bytes += made_bytes
        if not had_room or self._needed_bytes <= self._budget_bytes:
            return
        warning = BudgetWarning(
            f"expected recoup.fit to know every optimizer, got a step of "
            f"{type(optimizer).__name__}, whose state for this model takes "
            f"{print_bytes(made_bytes)}: a step was planned without it; "
            f"{needs(self._needed_bytes, self._budget_bytes)}. Call recoup.fit with "
            "optimizer=, which counts its state.",
            needed_bytes=self._needed_bytes,
            budget_bytes=self._budget_bytes,
        )
        warnings.warn(warning, stacklevel=user_stacklevel())


def _state_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Return the bytes of an optimizer's state for a model, on the model's device."""
    device = device_of(model)
    states = [optimizer.state[p] for p in model.parameters() if p in optimizer.state]
    held = [t for t in tensors([*map(dict, states)]) if t.device.type == device.type]
    found = {id(storage): storage for storage in storages_in(held)}
    return sum(storage.nbytes() for storage in found.values())


@cache
def _follow_steps() -> None:
    """Have torch report every step of an optimizer, from now on."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for model, watch in list(_WATCHES.items()):
        watch.before(model, optimizer)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for model, watch in list(_WATCHES.items()):
        watch.after(model, optimizer)

"""Models, optimizers and schedulers: checked and joined before the first step."""

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from recoup.backend.training.optimizer_steps import joined, parameters_of
from recoup.errors import UsageError
from recoup.precision.scaler import GradientScaler

_log = logging.getLogger(__name__)


def check_parts(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    schedulers: Sequence[LRScheduler],
) -> Optimizer:
    """Refuse a model, optimizers and schedulers that do not belong together.

    Returns:
        The optimizers as one.
    """
    several = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if not several or not all(isinstance(each, Optimizer) for each in several):
        raise UsageError(
            "expected an optimizer or a list of optimizers, got "
            f"{[type(each).__name__ for each in several]}."
        )
    try:
        joint = joined(several)
    except ValueError as error:
        raise UsageError(
            f"{error}: a step would update it twice; give each optimizer its own "
            "parameters."
        ) from None
    for each in several:
        _check_optimizer(model, each)
    for scheduler in schedulers:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise UsageError(
                "expected a scheduler without a metric, got ReduceLROnPlateau, which "
                "needs a measure of progress; call scheduler.step(measure) between "
                "epochs."
            )
        if all(scheduler.optimizer is not each for each in several):
            raise UsageError(
                "expected a scheduler of the trainer's optimizer, got one of another."
            )
    return joint


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    parameters = {id(parameter) for parameter in model.parameters()}
    if not parameters:
        raise UsageError(
            f"expected a model with parameters to train, got {type(model).__name__} "
            "without any."
        )
    if parameters.isdisjoint(map(id, parameters_of(optimizer))):
        raise UsageError(
            "expected an optimizer of the model's parameters, got one with none of "
            "the model's parameters; make it from model.parameters() after moving, "
            "wrapping or sharding the model."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            "expected an optimizer that needs the loss once a step, got "
            f"{type(optimizer).__name__}, which needs a closure; use another."
        )


def enter_training_mode(model: nn.Module) -> None:
    """Put a model in training mode if no part of it is.

    If only some parts are in evaluation mode, that is on purpose, for example for
    normalization layers with frozen statistics.
    """
    if not any(module.training for module in model.modules()):
        _log.warning(
            "the model was in evaluation mode, in which dropout and batch statistics "
            "are off; it is put in training mode"
        )
        model.train()


def check_types(model: nn.Module, scaler: GradientScaler | None) -> None:
    """Refuse parameters in float16 with a scaler."""
    if scaler is None:
        return
    if any(parameter.dtype is torch.float16 for parameter in model.parameters()):
        raise UsageError(
            "expected parameters in float32 with fp16, or small updates are lost, got "
            "some in float16; leave out model.half(), or use bf16."
        )


class JointScheduler:
    """Advance several schedulers together."""

    def __init__(self, members: Sequence[LRScheduler]) -> None:
        self.members = list(members)

    def step(self) -> None:
        """Advance every member."""
        for member in self.members:
            member.step()

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the learning rates of all members' groups, in order."""
        return [rate for member in self.members for rate in member.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all members, in order."""
        return {"members": [member.state_dict() for member in self.members]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of schedulers of the same kinds."""
        for member, state in zip(self.members, state_dict["members"], strict=True):
            member.load_state_dict(state)


def as_schedulers(
    given: LRScheduler | Sequence[LRScheduler] | None,
) -> list[LRScheduler]:
    """Return schedulers as a list, empty without any."""
    if given is None:
        return []
    return list(given) if isinstance(given, Sequence) else [given]


def joined_schedulers(
    schedulers: Sequence[LRScheduler],
) -> LRScheduler | JointScheduler | None:
    """Return one scheduler that advances all, or None without any."""
    if len(schedulers) > 1:
        return JointScheduler(schedulers)
    return schedulers[0] if schedulers else None

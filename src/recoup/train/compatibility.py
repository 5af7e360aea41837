"""What cannot be trained together is refused before the first step."""

import inspect

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from recoup.core.errors import UsageError
from recoup.precision.scaler import GradientScaler


def check_parts(
    model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None
) -> None:
    """Refuse a model, an optimizer and a scheduler that do not belong together.

    Raises:
        UsageError: They do not.
    """
    parameters = {id(parameter) for parameter in model.parameters()}
    if not parameters:
        raise UsageError(f"this {type(model).__name__} has no parameters to train.")
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(id(parameter) in parameters for parameter in own):
        raise UsageError(
            "the optimizer has none of the model's parameters: make it from "
            "model.parameters() after moving, wrapping or sharding the model."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{type(optimizer).__name__} computes the loss several times a step, from "
            "a closure. The trainer computes it once: use another optimizer."
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "ReduceLROnPlateau needs a measure of progress, which the trainer does not "
            "have: call scheduler.step(measure) yourself between epochs."
        )
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise UsageError("the scheduler is of another optimizer than the trainer.")


def check_types(model: nn.Module, scaler: GradientScaler | None) -> None:
    """Refuse parameters in float16 beside a scaler.

    Raises:
        UsageError: There are some.
    """
    if scaler is None:
        return
    if any(parameter.dtype is torch.float16 for parameter in model.parameters()):
        raise UsageError(
            "fp16 needs its parameters in float32, or small updates are lost: found "
            "some in float16. Leave out model.half(); or use bf16."
        )

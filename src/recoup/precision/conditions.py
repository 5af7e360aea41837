"""What a scaler asks of its numbers, its device and the gradients."""

import math

import torch
from torch.optim import Optimizer

from recoup.errors import UsageError


def default_device() -> str:
    """Return the kind of device to scale for: the accelerator, or else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def check_device(device: str) -> None:
    """Raise unless there is such a device here."""
    if device != "cpu" and device != default_device():
        raise UsageError(
            f"a scaler for {device!r} was asked for: there is no such device here. "
            "Leave the device out, or give 'cpu', or enabled=False."
        )


def check_bounds(scale: float, least: float, largest: float) -> None:
    """Raise unless the scale lies between finite bounds above 0."""
    if not 0 < least <= scale <= largest or not math.isfinite(largest):
        raise UsageError(
            f"a scale lies between finite bounds above 0: got {scale:g} between "
            f"min_scale={least:g} and max_scale={largest:g}."
        )


def check_factors(growth: float, backoff: float, interval: int) -> None:
    """Raise unless the scale grows, backs off and waits."""
    if not growth > 1 or not 0 < backoff < 1 or interval < 1:
        raise UsageError(
            "a scale grows by more than 1, backs off by a share between 0 and 1, and "
            f"waits at least one step: got growth_factor={growth:g}, "
            f"backoff_factor={backoff:g} and growth_interval={interval}."
        )


def require_gradients(optimizer: Optimizer) -> None:
    """Raise unless there are gradients."""
    groups = optimizer.param_groups
    if all(p.grad is None for group in groups for p in group["params"]):
        raise UsageError(
            "the optimizer's parameters have no gradients. Run the backward pass of "
            "scaler.scale(loss) first."
        )


def refuse_half(optimizer: Optimizer, error: Exception) -> None:
    """Raise if there are gradients in float16, which torch has refused."""
    if any(
        parameter.grad is not None and parameter.grad.dtype is torch.float16
        for group in optimizer.param_groups
        for parameter in group["params"]
    ):
        raise UsageError(
            "gradients in float16 cannot be unscaled without losing the small ones: "
            "keep the parameters in float32 and compute under autocast, instead of "
            "model.half()."
        ) from error

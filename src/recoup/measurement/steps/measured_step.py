"""Measure one training step: its memory, its time and its arithmetic."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from recoup.backend.memory.meters import device_meter
from recoup.errors import UsageError
from recoup.measurement.timing.pace import synchronize


@dataclass(frozen=True, slots=True)
class Step:
    """A training step in two halves, so that what lives between them can be read.

    Attributes:
        forward: Compute the loss.
        backward: Do with the loss what remains: by default its backward pass; it may
            also run an optimizer.
        prepare: Called before every run and not measured, for example
            `model.zero_grad`.
        resident: Tensors and modules that exist before the step. An accelerator's
            allocator counts them in any case; elsewhere they count if named here.
    """

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], object] = Tensor.backward
    prepare: Callable[[], object] = lambda: None
    resident: tuple[Tensor | nn.Module, ...] = ()


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of one training step.

    Attributes:
        peak_bytes: The most bytes alive at any moment of the step.
        saved_bytes: Bytes that forward left alive for backward, the loss included:
            held by autograd or by a recoup region.
        seconds: Median time of the step, until the device has finished it.
        host_seconds: Median time until the host has issued it.
        flops: Floating-point operations as `torch.utils.flop_counter` counts them:
            matrix products, convolutions and attention.
    """

    peak_bytes: int
    saved_bytes: int
    seconds: float
    host_seconds: float
    flops: int


def measure_step(
    step: Step | Callable[[], Tensor],
    *,
    device: torch.device | str,
    warmup: int = 1,
    repeats: int = 5,
) -> StepCost:
    """Run a training step and return what it costs.

    The step runs `warmup + repeats + 2` times: unmeasured, timed, once under a memory
    meter and once under a counter of operations, because each of these two slows
    the host down. The device is synchronised around every timed run.

    Args:
        step: The step, or just its forward half: a function without arguments that
            returns the loss.
        device: Where the step computes and its memory is counted.
        warmup: Unmeasured runs, in which caches fill and regions are verified.
        repeats: Timed runs.

    Raises:
        UsageError: `warmup` is negative, `repeats` is not positive, or the step
            returns no tensor.

    Examples:
        >>> weight = torch.ones(10, 10, requires_grad=True)
        >>> cost = measure_step(lambda: (weight @ weight).exp().sum(), device="cpu")
        >>> cost.flops  # one product of 2 * 10**3 in forward, two in backward
        6000
        >>> cost.saved_bytes  # the result of exp, and the loss
        404
    """
    if warmup < 0 or repeats < 1:
        raise UsageError(
            "expected warmup of at least 0 and repeats of at least 1, got "
            f"warmup={warmup} and repeats={repeats}."
        )
    step = step if isinstance(step, Step) else Step(step)
    device = torch.device(device)
    for _ in range(warmup):
        _run(step)
    times = [_timed(step, device) for _ in range(repeats)]
    saved_bytes, peak_bytes = _memory(step, device)
    return StepCost(
        peak_bytes=peak_bytes,
        saved_bytes=saved_bytes,
        seconds=statistics.median(seconds for seconds, _ in times),
        host_seconds=statistics.median(host for _, host in times),
        flops=_flops(step),
    )


def _run(step: Step) -> None:
    step.prepare()
    step.backward(_loss(step))


def _loss(step: Step) -> Tensor:
    loss = step.forward()
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"expected forward to return the loss, a tensor, got "
            f"{type(loss).__name__}; leave the backward pass to the measurement."
        )
    return loss


def _timed(step: Step, device: torch.device) -> tuple[float, float]:
    step.prepare()
    synchronize(device)
    start = time.perf_counter()
    step.backward(_loss(step))
    host_seconds = time.perf_counter() - start
    synchronize(device)
    return time.perf_counter() - start, host_seconds


def _memory(step: Step, device: torch.device) -> tuple[int, int]:
    step.prepare()
    with device_meter(device) as meter:
        meter.track(*step.resident)
        before_bytes = meter.live_bytes
        loss = _loss(step)
        saved_bytes = meter.live_bytes - before_bytes
        step.backward(loss)
        return saved_bytes, meter.peak_bytes


def _flops(step: Step) -> int:
    step.prepare()
    with FlopCounterMode(display=False) as counter:
        step.backward(_loss(step))
    return counter.get_total_flops()

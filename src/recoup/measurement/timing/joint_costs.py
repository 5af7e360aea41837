"""What recomputing and saving the values of a captured block costs, in seconds."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from recoup.backend.compiler.joint_graphs import JointGraph, KernelCall, TensorSpec
from recoup.core.block_options import JointForward
from recoup.measurement.timing.pace import synchronize

_FUSED = 0.02
"""What a fused operator costs, as a share of the time that its traffic would take: it
is computed in registers, in a kernel that runs in any case."""

_COPY_BYTES = 1 << 26
_REPEATS = 3


class KernelTimes:
    """Times kernels by running them on tensors of the same geometry, each once.

    Args:
        device: Where they run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}
        source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        seconds = self._timed(lambda: target.copy_(source))
        self.bytes_per_second = 2 * _COPY_BYTES / seconds

    def seconds(self, call: KernelCall, traffic_bytes: int) -> float:
        """Return the time of a kernel; by its traffic if it cannot run by itself."""
        key = f"{call.target}{call.args}{call.kwargs}"
        known = self._seconds.get(key)
        if known is None:
            try:
                known = self._run(call)
            except (RuntimeError, TypeError, ValueError, IndexError):
                known = traffic_bytes / self.bytes_per_second
            self._seconds[key] = known
        return known

    @torch.no_grad()
    def _run(self, call: KernelCall) -> float:
        args = _made(call.args, self._device)
        return self._timed(lambda: call.target(*args, **call.kwargs))

    def _timed(self, function: Callable[[], object]) -> float:
        function()
        synchronize(self._device)
        best = float("inf")
        for _ in range(_REPEATS):
            start = time.perf_counter()
            function()
            synchronize(self._device)
            best = min(best, time.perf_counter() - start)
        return best


def costed(joint: JointGraph, times: KernelTimes) -> JointForward:
    """Return a block's forward with the cost of recomputing and saving its values."""
    speed = times.bytes_per_second
    operations = []
    for number, operation in enumerate(joint.graph.operations):
        call, traffic = joint.calls[number], joint.traffic[number]
        if number in joint.once:
            seconds = 0.0
        elif call is not None:
            seconds = times.seconds(call, traffic)
        else:
            written = sum(
                joint.graph.bytes_of(v) for v in operation.makes if v in joint.whole
            )
            seconds = (_FUSED * traffic + 2 * written) / speed
        operations.append(replace(operation, seconds=seconds))
    graph = replace(joint.graph, operations=tuple(operations))
    save_seconds = []
    for value in range(len(graph.values)):
        producer = graph.values[value].producer
        is_written = value in joint.materialized or producer in joint.once
        passes = 1 if is_written else 2
        nbytes = 0 if value in joint.resident else graph.bytes_of(value)
        save_seconds.append(passes * nbytes / speed)
    return JointForward(
        joint.digest,
        graph,
        joint.names,
        joint.demanded,
        joint.resident,
        tuple(save_seconds),
    )


def _made(argument: Any, device: torch.device) -> Any:
    if isinstance(argument, TensorSpec):
        made: Tensor = argument.make(device)
        return made
    if isinstance(argument, list | tuple):
        return type(argument)(_made(item, device) for item in argument)
    return argument

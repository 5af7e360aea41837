"""The measured step: traced at floor memory, with every block recomputed."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from recoup.backend.links import link_bytes_per_second
from recoup.backend.memory import device_meter
from recoup.backend.timers import Laps, OperatorTimer
from recoup.backend.trees import tensors
from recoup.core.errors import UsageError
from recoup.core.graph import Graph
from recoup.core.simulation import simulate
from recoup.engine.runs import Cuts
from recoup.measure.graphs import graph_of, recompute_all
from recoup.measure.observation import Instruments, cut, observe
from recoup.measure.recording import recording_seconds
from recoup.measure.training import TrainingStep

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

STEP_BY_FORWARD = 2.5
"""How much longer a plain step keeps the host than its forward without gradients does:
2.4 times for a ResNet, 3.4 for a GPT, both of layers that compute nothing to speak of.
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one real step cost.

    Attributes:
        peak_bytes: The most bytes in use at any moment.
        seconds: How long it took, until the device had finished.
    """

    peak_bytes: int
    seconds: float


def run_step(step: TrainingStep, *, resident: Sequence[object] = ()) -> Cost:
    """Run a step once and return what it cost.

    It begins as every run does, without gradients. On a device without an allocator
    that counts, the peak is counted operator by operator, and the time is longer.
    """
    step.begin()
    with device_meter(step.device) as meter:
        meter.track(step.model, *tensors(step.batch), *tensors(list(resident)))
        seconds = _timed(step)
        peak_bytes = meter.peak_bytes
    step.model.zero_grad(set_to_none=True)
    return Cost(peak_bytes, seconds)


def time_step(step: TrainingStep, *, repeats: int = 2) -> float:
    """Return the least time of a step among some runs that follow each other.

    They are issued as training issues them: the host waits for an accelerator after the
    last one alone, and one that finds it idle comes first and does not count.
    """
    if step.device.type == "cpu":
        return min(_time_alone(step) for _ in range(repeats))
    laps = Laps(step.device)
    step.begin()
    for _ in range(repeats + 1):
        step.run()
        laps.mark()
        step.begin(waiting=False)
    return min(laps.seconds())


def _time_alone(step: TrainingStep) -> float:
    step.begin()
    seconds = _timed(step)
    step.model.zero_grad(set_to_none=True)
    return seconds


def measure_floor(
    step: TrainingStep,
    *,
    names: Sequence[str] | None = None,
    resident: Sequence[object] = (),
) -> Graph:
    """Run a step in which every block is recomputed, and return its graph.

    Runs the step four times: once to warm up, once traced, twice for its time. Beside
    an accelerator once more, and the model without gradients.

    Args:
        step: The step.
        names: The paths of the modules that are its blocks; by default they are found.
        resident: What else is in memory during the step, as an optimizer's state.

    Raises:
        UsageError: A named block does not exist, the step does not call the model, or
            the model has no memory.
    """
    if any(parameter.is_meta for parameter in step.model.parameters()):
        raise UsageError(
            "the model is on the meta device, where nothing can be computed. Make it "
            "on a real one, or measure it dry: recoup.measure(..., dry=True)."
        )
    instruments = Instruments(
        meter=lambda: device_meter(step.device),
        timer=lambda: OperatorTimer(step.device),
    )
    seen = observe(step, instruments, names=names, resident=resident)
    trace, timer = seen.trace, seen.timer
    with (
        cut(step, Cuts(seen.cuts)),
        _noted_calls(step.model, trace.model_calls) as calls,
    ):
        floor_seconds = time_step(step)
    graph = graph_of(trace, timer.seconds, blocks=seen.cuts)
    graph = replace(
        graph,
        step_seconds=graph.forward_seconds
        + sum(map(timer.seconds, trace.backward_timings)),
        link_bytes_per_second=link_bytes_per_second(step.device),
    )
    times = max(1, round(trace.model_calls / graph.model_calls))
    if step.device.type == "cpu":
        graph = replace(graph, recording_seconds=recording_seconds())
        return calibrated(_run_times(graph, times), floor_seconds)
    host_seconds = plain_host_seconds(step, calls)
    return calibrated(
        _run_times(graph, times), floor_seconds, host_seconds=host_seconds
    )


def _run_times(graph: Graph, times: int) -> Graph:
    """Return the graph of a step that runs forward and backward so many times.

    The plan is carried out as many times, and so is all that it runs again.
    """
    if times == 1:
        return graph
    return replace(
        graph,
        operations=tuple(
            replace(operation, seconds=operation.seconds * times)
            for operation in graph.operations
        ),
        recording_seconds=graph.recording_seconds * times,
    )


def calibrated(
    graph: Graph, floor_seconds: float, *, host_seconds: float | None = None
) -> Graph:
    """Return the graph with times by which the measured step took what it took.

    Operators that add up to more than the step overlapped in it. Time that they do not
    explain is the host's. Beside an accelerator the plain step has its share of that as
    far as it keeps the host longer than the device, and recording has the rest.

    Args:
        graph: The graph, with the times of operators.
        floor_seconds: The time of a step in which every block is recomputed.
        host_seconds: What the host takes for a plain step beside an accelerator.
    """
    floor = recompute_all(graph)
    predicted = simulate(graph, floor).seconds
    if predicted <= floor_seconds or not predicted:
        unexplained = floor_seconds - predicted
        recording = 0.0
        if host_seconds is not None:
            late = min(max(0.0, host_seconds - graph.step_seconds), unexplained)
            recording, unexplained = unexplained - late, late
        unit = simulate(replace(graph, recording_seconds=1.0), floor).recording_seconds
        return replace(
            graph,
            step_seconds=graph.step_seconds + unexplained,
            recording_seconds=graph.recording_seconds + recording / max(1.0, unit),
        )
    share = floor_seconds / predicted
    return replace(
        graph,
        operations=tuple(
            replace(operation, seconds=operation.seconds * share)
            for operation in graph.operations
        ),
        step_seconds=graph.step_seconds * share,
        recording_seconds=graph.recording_seconds * share,
    )


def plain_host_seconds(step: TrainingStep, calls: Iterable[Call]) -> float:
    """Return about how long a plain step keeps the host, which may not fit to be run.

    Runs the model without gradients, which needs no memory to speak of.

    Args:
        step: The step.
        calls: What it calls its model with.

    Returns:
        Infinity if the model cannot be run without gradients.
    """
    step.begin()
    _synchronize(step.device)
    start = time.perf_counter()
    try:
        with torch.no_grad():
            for args, kwargs in calls:
                step.model(*args, **kwargs)
    except RuntimeError:  # it takes gradients in its forward
        return float("inf")
    return STEP_BY_FORWARD * (time.perf_counter() - start)


@contextmanager
def _noted_calls(model: nn.Module, count: int) -> Iterator[Iterable[Call]]:
    """Yield what the model was called with, the last so many times."""
    calls: deque[Call] = deque(maxlen=count)

    def note(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))

    handle = model.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def _timed(step: TrainingStep) -> float:
    _synchronize(step.device)
    start = time.perf_counter()
    step.run()
    _synchronize(step.device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

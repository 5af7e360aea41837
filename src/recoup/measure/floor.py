"""The measured step: traced at floor memory, with every block recomputed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from recoup.backend.links import link_bytes_per_second
from recoup.backend.memory import device_meter
from recoup.backend.timers import OperatorTimer
from recoup.backend.trees import tensors
from recoup.core.errors import UsageError
from recoup.core.graph import Graph
from recoup.core.simulation import simulate
from recoup.engine.runs import Cuts
from recoup.measure.graphs import graph_of, recompute_all
from recoup.measure.observation import Instruments, cut, observe
from recoup.measure.recording import recording_seconds
from recoup.measure.training import TrainingStep


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
    """Return the least time of a step among some runs."""
    least = float("inf")
    for _ in range(repeats):
        step.begin()
        least = min(least, _timed(step))
    step.model.zero_grad(set_to_none=True)
    return least


def measure_floor(
    step: TrainingStep,
    *,
    names: Sequence[str] | None = None,
    resident: Sequence[object] = (),
) -> Graph:
    """Run a step in which every block is recomputed, and return its graph.

    Runs the step four times: once to warm up, once traced, twice for its time.

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
    with cut(step, Cuts(seen.cuts)):
        floor_seconds, host_seconds = _time_forward_too(step)
    graph = graph_of(trace, timer.seconds, blocks=seen.cuts)
    graph = replace(
        graph,
        step_seconds=graph.forward_seconds
        + sum(map(timer.seconds, trace.backward_timings)),
        link_bytes_per_second=link_bytes_per_second(step.device),
    )
    graph = _with_recording(graph, host_seconds, on_host=step.device.type == "cpu")
    times = max(1, round(trace.model_calls / graph.model_calls))
    return _calibrated(_run_times(graph, times), floor_seconds)


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


def _with_recording(graph: Graph, host_seconds: float, *, on_host: bool) -> Graph:
    """Return the graph with what recording adds to the time of the step.

    Beside an accelerator the host's time counts only as far as it is the longer one.
    """
    seconds = recording_seconds()
    operations = max(1, len(graph.operations))
    if not on_host:
        plain_seconds = host_seconds - seconds * operations
        late = host_seconds - max(graph.forward_seconds, plain_seconds)
        seconds = max(0.0, late) / operations
    return replace(graph, recording_seconds=seconds)


def _calibrated(graph: Graph, floor_seconds: float) -> Graph:
    """Return the graph with times by which the measured step took what it took.

    Operators that add up to more than the step overlapped in it. Time that they do not
    explain is the host's, and any plan's.
    """
    predicted = simulate(graph, recompute_all(graph)).seconds
    if predicted <= floor_seconds or not predicted:
        unexplained = floor_seconds - predicted
        return replace(graph, step_seconds=graph.step_seconds + unexplained)
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


def _time_forward_too(step: TrainingStep) -> tuple[float, float]:
    """Return the time of a step, and of the host in the model's forward."""
    moments: list[float] = []

    def note(*_: object) -> None:
        moments.append(time.perf_counter())

    handles = (
        step.model.register_forward_pre_hook(note, prepend=True),
        step.model.register_forward_hook(note),
    )
    try:
        seconds = time_step(step)
    finally:
        for handle in handles:
            handle.remove()
    spans = [stop - start for start, stop in zip(*[iter(moments)] * 2, strict=False)]
    return seconds, min(spans, default=0.0)


def _timed(step: TrainingStep) -> float:
    _synchronize(step.device)
    start = time.perf_counter()
    step.run()
    _synchronize(step.device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

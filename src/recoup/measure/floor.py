"""The measured step: traced at floor memory, with every block recomputed."""

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from recoup.backend.graph import pop_hooks, push_hooks
from recoup.backend.ledger import storages_in
from recoup.backend.links import link_bytes_per_second
from recoup.backend.memory import device_meter
from recoup.backend.timers import OperatorTimer
from recoup.backend.trees import tensors
from recoup.core.errors import UsageError
from recoup.core.graph import Graph
from recoup.core.simulation import simulate
from recoup.engine.observers import subscribe, unsubscribe
from recoup.engine.plans import Applied
from recoup.engine.runs import Cuts
from recoup.measure.blocks import block_names
from recoup.measure.graphs import graph_of, recompute_all, torn_blocks
from recoup.measure.recording import recording_seconds
from recoup.measure.trace import Trace
from recoup.measure.tracing import Tracer
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

    Gradients are dropped before. On a device without an allocator that counts, the
    peak is counted operator by operator, and the time is that of a second run.
    """
    step.model.zero_grad(set_to_none=True)
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
        step.model.zero_grad(set_to_none=True)
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
        UsageError: A named block does not exist, or the step does not call the model
            exactly once.
    """
    known = {name for name, _ in step.model.named_modules()}
    chosen = tuple(names) if names is not None else block_names(step.model)
    for name in chosen:
        if name not in known:
            raise UsageError(f"the model has no module {name!r} to take as a block.")
    cuts = every_kth(chosen) if _are_leaves(step.model, chosen) else chosen
    with _cut(step, Cuts(cuts)):
        step.model.zero_grad(set_to_none=True)
        step.run()
    trace, timer = _trace(step, cuts, resident)
    torn = torn_blocks(trace, cuts)
    if torn:
        cuts = tuple(name for name in cuts if name not in torn)
        trace, timer = _trace(step, cuts, resident)
    with _cut(step, Cuts(cuts)):
        floor_seconds, host_seconds = _time_forward_too(step)
    graph = graph_of(trace, timer.seconds, blocks=cuts)
    graph = replace(
        graph,
        step_seconds=graph.forward_seconds
        + sum(map(timer.seconds, trace.backward_timings)),
        link_bytes_per_second=link_bytes_per_second(step.device),
    )
    graph = _with_recording(graph, host_seconds, on_host=step.device.type == "cpu")
    return _calibrated(graph, floor_seconds)


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
    predicted = simulate(graph, recompute_all(graph.blocks)).seconds
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


def every_kth(names: Sequence[str]) -> tuple[str, ...]:
    """Return about the square root of as many names, evenly spread."""
    return tuple(names[:: max(1, math.isqrt(len(names)))])


def _trace(
    step: TrainingStep, cuts: tuple[str, ...], resident: Sequence[object]
) -> tuple[Trace, OperatorTimer]:
    timer = OperatorTimer(step.device)
    step.model.zero_grad(set_to_none=True)
    storages = storages_in((step.model, step.batch, list(resident)))
    with device_meter(step.device) as meter:
        meter.track(step.model, *tensors(step.batch), *tensors(list(resident)))
        tracer = Tracer(meter, timer, storages)
        subscribe(tracer)
        push_hooks(*tracer.plain_hooks())
        try:
            with (
                _boundaries_noted(step.model, tracer),
                _cut(step, Cuts(cuts, policy=tracer)),
                tracer,
            ):
                step.run()
        finally:
            pop_hooks()
            unsubscribe(tracer)
        trace = tracer.close()
    step.model.zero_grad(set_to_none=True)
    return trace, timer


@contextmanager
def _cut(step: TrainingStep, cuts: Cuts) -> Iterator[None]:
    applied = Applied(step.model, cuts)
    try:
        yield
    finally:
        applied.remove()


@contextmanager
def _boundaries_noted(model: nn.Module, tracer: Tracer) -> Iterator[None]:
    """Tell the tracer whenever a module is entered or left."""
    calls: Counter[tuple[str, bool]] = Counter()

    def note(
        name: str,
        entering: bool,  # noqa: FBT001
        _: nn.Module,
        args: object,
        kwargs: object,
        output: object = None,
    ) -> None:
        call = calls[name, entering]
        calls[name, entering] += 1
        if not name and call:
            raise UsageError(
                "the step calls the model more than once, and a plan is for one call. "
                "Put the calls into one module, and give that as the model."
            )
        tracer.reach(
            name, call, entering=entering, passed=tensors([args, kwargs, output])
        )

    handles: list[RemovableHandle] = []
    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(
                partial(note, name, True), with_kwargs=True, prepend=True
            ),
            module.register_forward_hook(partial(note, name, False), with_kwargs=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _are_leaves(model: nn.Module, names: Sequence[str]) -> bool:
    return all(not list(model.get_submodule(name).children()) for name in names)


def _timed(step: TrainingStep) -> float:
    _synchronize(step.device)
    start = time.perf_counter()
    step.run()
    _synchronize(step.device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

"""Host time of a step for recording and replaying; times calibrated by real steps."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from recoup.core.footprint import total_footprint
from recoup.core.graph import Graph, HostCosts
from recoup.core.restoring import removing
from recoup.core.segments import Segment, recorded_operators
from recoup.core.simulation import simulate
from recoup.engine.recording.region import Region
from recoup.engine.recording.region_options import Options
from recoup.measurement.steps.training_step import TrainingStep
from recoup.measurement.timing.pace import Pace, synchronize
from recoup.planners.baselines import recompute_all

RECORDING_BY_LEAST = 4.0
"""Ratio of the time to record an operator of a model, in forward and backward, to that
of the simplest operator in forward: 2.5 to 5 for eight models of small tensors on the
CPU."""

_OPERATORS = 128
_REPEATS = 5


def recording_seconds() -> float:
    """Return the host time that a region usually adds to each operator of a model.

    Costs a few milliseconds.
    """
    return RECORDING_BY_LEAST * least_recording_seconds()


def least_recording_seconds() -> float:
    """Return the host time that a region adds to the simplest operator of forward.

    Runs a row of small operators on the CPU several times, with and without a region.
    Costs a few milliseconds.

    Examples:
        >>> 0 <= least_recording_seconds() < 0.01
        True
    """
    x = torch.ones(8, device="cpu", requires_grad=True)

    def row() -> float:
        start = time.perf_counter()
        y = x
        for _ in range(_OPERATORS):
            y = y * x
        return time.perf_counter() - start

    def recorded() -> float:
        # Without `begin`, so that observers of regions do not count this one.
        region = Region("a row", Options(verify="off"), "row")
        region.open()
        seconds = row()
        region.close()
        return seconds

    recorded()
    plain = min(row() for _ in range(_REPEATS))
    inside = min(recorded() for _ in range(_REPEATS))
    return max(0.0, inside - plain) / recorded_operators(_OPERATORS)


STEP_BY_FORWARD = 2.5
"""Ratio of the host time of a plain step to that of its forward without gradients: 1.7
for a ResNet-50 on an H200, 2.0 for a DenseNet-121, 4.7 for a mixture of experts, which
synchronises in between."""

REPLAY_BY_FORWARD = 1.5
"""Ratio of the host time to replay an operator to that in a forward without gradients:
1.2 for that ResNet, 1.6 for the DenseNet."""


class Calls:
    """The arguments of a model's calls in a step."""

    def __init__(self, count: int) -> None:
        self._arguments: deque[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = (
            deque(maxlen=count)
        )

    @contextmanager
    def noted(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Record the calls of models while the block runs."""
        with removing() as handles:
            for model in models:
                register = partial(model.register_forward_pre_hook, prepend=True)
                handles.append(register(self._note, with_kwargs=True))
            yield

    def again(self, step: TrainingStep) -> float:
        """Repeat the calls without gradients, in little memory; return the host time.

        Returns:
            Infinity if the model cannot run without gradients.
        """
        try:
            return min(self._timed_again(step) for _ in range(2))
        except RuntimeError:  # its forward computes gradients
            return float("inf")

    @torch.no_grad()
    def _timed_again(self, step: TrainingStep) -> float:
        step.begin()
        synchronize(step.device)
        start = time.perf_counter()
        for model, args, kwargs in list(self._arguments):
            model(*args, **kwargs)
        return time.perf_counter() - start

    def _note(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._arguments.append((model, args, kwargs))


def host_costs_of(
    graph: Graph,
    pace: Pace,
    *,
    plain_forward_seconds: float,
    least_seconds: float = 0.0,
) -> HostCosts:
    """Return the host costs of the step.

    A plain step may not fit in memory, so its host time, and that of a recomputed
    operator, is estimated from a forward without gradients. The rest of the time of a
    step with every block recomputed is recording, in forward and backward. If the step
    is not CPU-bound, the host may wait for room in the device's queue, so recording is
    limited to its usual time.

    Args:
        graph: The step.
        pace: The pace of the step with every block recomputed.
        plain_forward_seconds: The host time of a forward without gradients.
        least_seconds: The host time to record the simplest operator, a lower bound for
            all others.
    """
    work = total_footprint(graph, recompute_all(graph))
    host = pace.host_seconds
    forward = min(plain_forward_seconds, host / STEP_BY_FORWARD)
    again = REPLAY_BY_FORWARD * forward / max(1, len(graph.operations))
    least = HostCosts(0.0, least_seconds, again).seconds(work.recorded, work.replayed)
    plain = min(STEP_BY_FORWARD * forward, max(0.0, host - least))
    added = host - plain
    least_recording = min(work.recorded * least_seconds, added)
    recording = max(least_recording, added - work.replayed * again)
    replaying = added - recording
    if not pace.is_bound_by_host:
        recording = min(recording, RECORDING_BY_LEAST * least_recording)
    return HostCosts(
        plain_seconds=plain,
        recording_seconds=recording / max(1, work.recorded),
        replaying_seconds=replaying / max(1, work.replayed),
    )


def learned(thought: float, pace: Pace) -> float:
    """Return the factor from the predicted to the measured host time.

    A host that runs one plan slower than predicted is assumed slower at everything. If
    the step is not CPU-bound, the measured time is only an upper bound.

    Examples:
        >>> learned(2.0, Pace(seconds=4.0, host_seconds=4.0))
        2.0
        >>> learned(2.0, Pace(seconds=8.0, host_seconds=4.0))
        1.0
    """
    if not thought or (not pace.is_bound_by_host and thought <= pace.host_seconds):
        return 1.0
    return pace.host_seconds / thought


_LEAST_FACTOR = 0.1
"""Lower bound on the factor of `compared`, because no plan is free."""

Plans = Sequence[Sequence[Segment]]
"""The segments of each pass of a step, in the order of `Graph.passes`."""


def calibrated(graph: Graph, floor_seconds: float) -> Graph:
    """Return the graph, scaled so that its floor's predicted time is the given one.

    If the operators add up to more than the step, they overlapped: all times shrink.
    Time beyond their sum is attributed to the plain step.
    """
    predicted = sum(
        simulate(each, recompute_all(each)).device_seconds for each in graph.passes
    )
    if predicted > floor_seconds:
        share = floor_seconds / predicted
        return graph.map_passes(lambda each: scaled(each, share))
    plain = sum(each.step_seconds for each in graph.passes) or 1.0
    unexplained = floor_seconds - predicted

    def longer(each: Graph) -> Graph:
        share = each.step_seconds / plain
        return replace(each, step_seconds=each.step_seconds + share * unexplained)

    return graph.map_passes(longer)


def issued(
    graph: Graph,
    pace: Pace,
    *,
    plain_forward_seconds: float,
    least_seconds: float = 0.0,
) -> Graph:
    """Return the graph with the host costs of each pass; see `host_costs_of`."""
    total = sum(len(each.operations) for each in graph.passes) or 1

    def with_host(each: Graph) -> Graph:
        share = len(each.operations) / total
        host_costs = host_costs_of(
            each,
            Pace(share * pace.seconds, share * pace.host_seconds),
            plain_forward_seconds=share * plain_forward_seconds,
            least_seconds=least_seconds,
        )
        return replace(each, host_costs=host_costs)

    graph = graph.map_passes(with_host)
    return corrected(graph, [recompute_all(each) for each in graph.passes], pace)


def corrected(graph: Graph, plans: Plans, pace: Pace) -> Graph:
    """Return the graph, scaled so that a plan's predicted time is its measured one.

    The pace shows whether device or host bounds the step, and that one's time; the
    other takes at most as long. All times of each are scaled by one factor. On the CPU,
    which has no separate host, the graph is unchanged.
    """
    passes = graph.passes
    costs = [simulate(*each) for each in zip(passes, plans, strict=True)]
    thought = sum(cost.host_seconds for cost in costs)
    if any(each.host_costs is None for each in passes):
        return graph
    factor = learned(thought, pace)
    graph = graph.map_passes(
        lambda each: replace(
            each, host_costs=each.host_costs and each.host_costs.scaled(factor)
        )
    )
    predicted = sum(cost.device_seconds for cost in costs)
    if not predicted or (predicted <= pace.seconds and pace.is_bound_by_host):
        return graph
    share = pace.seconds / predicted
    return graph.map_passes(lambda each: scaled(each, share))


def compared(
    graph: Graph, plans: Plans, planned_seconds: float, plain_seconds: float
) -> Graph:
    """Return the graph, scaled to the measured times of a plan and the plain step.

    Both were run in turns, so that other load does not distort their ratio. The plan's
    overhead, replays and recording, is scaled by one factor.
    """
    plain = sum(each.step_seconds for each in graph.passes)
    if not plain or not plain_seconds:
        return graph
    graph = graph.map_passes(lambda each: scaled(each, plain_seconds / plain))
    costs = [simulate(*each) for each in zip(graph.passes, plans, strict=True)]
    added = sum(cost.replay_seconds + cost.recording_seconds for cost in costs)
    if not added:
        return graph
    factor = max(_LEAST_FACTOR, (planned_seconds - plain_seconds) / added)

    def with_overhead(each: Graph) -> Graph:
        return replace(scaled(each, factor), step_seconds=each.step_seconds)

    return graph.map_passes(with_overhead)


def scaled(graph: Graph, share: float) -> Graph:
    """Return the graph with the device's times multiplied by `share`.

    Examples:
        >>> scaled(Graph((), 0, (), (), (), (), (), step_seconds=4.0), 0.5).step_seconds
        2.0
    """
    return replace(
        graph,
        operations=tuple(
            replace(operation, seconds=operation.seconds * share)
            for operation in graph.operations
        ),
        step_seconds=graph.step_seconds * share,
        recording_seconds=graph.recording_seconds * share,
    )

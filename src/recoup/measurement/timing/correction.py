"""Measured times against those of a whole step: what a graph says is what was seen."""

from collections.abc import Sequence
from dataclasses import replace

from recoup.core.graph import Graph
from recoup.core.segments import Segment
from recoup.core.simulation import simulate
from recoup.measurement.timing.issuing import issuing_of, learned
from recoup.measurement.timing.pace import Pace
from recoup.measurement.tracing.graphs import recompute_all

_LEAST_FACTOR = 0.1
"""A plan that ran no longer than the plain step is not taken to cost nothing."""

Plans = Sequence[Sequence[Segment]]
"""The segments of each pass of a step, in the order of `Graph.passes`."""


def calibrated(graph: Graph, floor_seconds: float) -> Graph:
    """Return the graph with times by which the measured step took what it took.

    Operators that add up to more than the step overlapped in it. Time that they do not
    explain is in the plain step as well.

    Args:
        graph: The graph, with the times of operators.
        floor_seconds: The time of a step in which every block is recomputed.
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
    """Return the graph with the host's time for each pass; see `issuing_of`.

    Args:
        graph: The step.
        pace: The pace of the step with every block recomputed.
        plain_forward_seconds: The host's time for a forward without gradients.
        least_seconds: What recording the simplest operator costs this host.
    """
    total = sum(len(each.operations) for each in graph.passes) or 1

    def with_host(each: Graph) -> Graph:
        share = len(each.operations) / total
        issuing = issuing_of(
            each,
            Pace(share * pace.seconds, share * pace.host_seconds),
            plain_forward_seconds=share * plain_forward_seconds,
            least_seconds=least_seconds,
        )
        return replace(each, issuing=issuing)

    graph = graph.map_passes(with_host)
    return corrected(graph, [recompute_all(each) for each in graph.passes], pace)


def corrected(graph: Graph, plans: Plans, pace: Pace) -> Graph:
    """Return the graph with times by which a plan takes what it was seen to take.

    Which of device and host the step waits for is known then, and so is how long that
    one takes; the other takes no longer. All times of each are wrong by one factor.
    Without a host beside the device the graph stays as it is.

    Args:
        graph: The step as it was measured.
        plans: A plan of it that has run: the segments of each pass.
        pace: Its pace.
    """
    passes = graph.passes
    costs = [simulate(*each) for each in zip(passes, plans, strict=True)]
    thought = sum(cost.issuing_seconds for cost in costs)
    if any(each.issuing is None for each in passes):
        return graph
    factor = learned(thought, pace)
    graph = graph.map_passes(
        lambda each: replace(each, issuing=each.issuing and each.issuing.scaled(factor))
    )
    predicted = sum(cost.device_seconds for cost in costs)
    if not predicted or (predicted <= pace.seconds and pace.is_bound_by_host):
        return graph
    share = pace.seconds / predicted
    return graph.map_passes(lambda each: scaled(each, share))


def compared(
    graph: Graph, plans: Plans, planned_seconds: float, plain_seconds: float
) -> Graph:
    """Return the graph with the times that a plan and the plain step were seen to take.

    Both were run in turns, so that their ratio is right whatever else the machine does.
    What the plan adds, in replays and recording, is wrong by one factor.

    Args:
        graph: The step as it was measured.
        plans: The plan: the segments of each pass.
        planned_seconds: What a step with the plan took.
        plain_seconds: What a step without it took.
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
    """Return the graph with a share of the device's times, or a multiple.

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

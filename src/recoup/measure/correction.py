"""Measured times against those of a whole step: what a graph says is what was seen."""

from collections.abc import Sequence
from dataclasses import replace

from recoup.core.graph import Graph
from recoup.core.segments import Segment
from recoup.core.simulation import simulate
from recoup.measure.graphs import recompute_all
from recoup.measure.issuing import learned
from recoup.measure.pace import Pace


def calibrated(graph: Graph, floor_seconds: float) -> Graph:
    """Return the graph with times by which the measured step took what it took.

    Operators that add up to more than the step overlapped in it. Time that they do not
    explain is in the plain step as well.

    Args:
        graph: The graph, with the times of operators.
        floor_seconds: The time of a step in which every block is recomputed.
    """
    predicted = simulate(graph, recompute_all(graph)).device_seconds
    if predicted <= floor_seconds:
        unexplained = floor_seconds - predicted
        return replace(graph, step_seconds=graph.step_seconds + unexplained)
    return scaled(graph, floor_seconds / predicted)


def corrected(graph: Graph, segments: Sequence[Segment], pace: Pace) -> Graph:
    """Return the graph with times by which a plan takes what it was seen to take.

    Which of device and host the step waits for is known then, and so is how long that
    one takes; the other takes no longer. All times of each are wrong by one factor.
    Without a host beside the device the graph stays as it is.

    Args:
        graph: The step as it was measured.
        segments: A plan of it that has run.
        pace: Its pace.
    """
    issuing = learned(graph, segments, pace)
    if issuing is None:
        return graph
    graph = replace(graph, issuing=issuing)
    predicted = simulate(graph, segments).device_seconds
    if not predicted or (predicted <= pace.seconds and pace.is_bound_by_host):
        return graph
    return scaled(graph, pace.seconds / predicted)


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

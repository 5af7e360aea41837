"""From the traces of a step's passes to its graph."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from recoup.core.graph import Graph
from recoup.core.simulation import simulate
from recoup.measurement.timing.correction import scaled
from recoup.measurement.tracing.graphs import graph_of
from recoup.measurement.tracing.trace import Trace


def step_graph(
    traces: Sequence[Trace],
    seconds_of: Callable[[int], float],
    *,
    blocks: Collection[str],
    recording_seconds: float = 0.0,
) -> Graph:
    """Return the graph of a step, with the times of its operators.

    Args:
        traces: What was seen of each pass.
        seconds_of: How long the operator with a certain timing took.
        blocks: The paths of the modules at which the traced step was cut.
        recording_seconds: What a region adds to each operator of forward.
    """
    kinds: dict[object, list[int]] = {}
    graphs: list[Graph] = []
    for number, trace in enumerate(traces):
        graph = graph_of(trace, seconds_of, blocks=blocks)
        backward_seconds = sum(map(seconds_of, trace.backward_timings))
        graphs.append(
            replace(
                graph,
                step_seconds=graph.forward_seconds + backward_seconds,
                recording_seconds=recording_seconds,
                roots=tuple(trace.roots),
            )
        )
        kinds.setdefault(_kind(graph), []).append(number)
    found: list[tuple[int, Graph, list[int]]] = []
    for numbers in kinds.values():
        largest = max((graphs[n] for n in numbers), key=_plain_bytes)
        seconds = sum(graphs[n].step_seconds for n in numbers)
        # A plan is carried out in each of them, and so is what it recomputes.
        whole = replace(scaled(largest, len(numbers)), step_seconds=seconds)
        found.append((_plain_bytes(largest), whole, numbers))
    found.sort(key=lambda item: -item[0])
    places = {n: place for place, (_, _, numbers) in enumerate(found) for n in numbers}
    main, *others = (graph for _, graph, _ in found)
    order = tuple(places[n] for n in range(len(traces))) if others else (0,)
    return replace(
        main, order=order, others=tuple(replace(other, order=()) for other in others)
    )


def _plain_bytes(graph: Graph) -> int:
    return simulate(graph, ()).peak_bytes


def _kind(graph: Graph) -> object:
    """Return what is equal for passes that one plan can serve."""
    return (
        tuple(
            (operation.name, tuple(map(graph.bytes_of, operation.makes)))
            for operation in graph.operations
        ),
        graph.boundaries,
        len(graph.saves),
    )

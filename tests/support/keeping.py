"""Whether a plan keeps all that it can: an independent check, by the simulator."""

from collections.abc import Sequence
from dataclasses import replace

from recoup.core.graph import Graph
from recoup.core.segments import Action, Segment
from recoup.core.simulation import simulate


def keepable(
    graph: Graph, segments: Sequence[Segment], budget_bytes: int
) -> list[tuple[str, int]]:
    """Return recomputed operators whose results could be kept in addition.

    The plan that keeps them fits into the budget and takes less time. Every operator
    is tried, with all that it makes and with each result alone. Segments with others
    inside are left out: planners change nothing in these.

    Returns:
        The names of the operators, with the bytes of what they make.
    """
    base = simulate(graph, segments)
    found: dict[int, tuple[str, int]] = {}
    for number, segment in enumerate(segments):
        inside = graph.operations_between(segment.start, segment.stop)
        again = {n for replay in base.replays for n in replay.operations if n in inside}
        for place in () if segment.inner else sorted(again):
            for values in _results(graph, place):
                kept = {**segment.actions, **dict.fromkeys(values, Action.KEEP)}
                trial = replace(segment, actions=kept)
                others = (*segments[:number], trial, *segments[number + 1 :])
                costs = simulate(graph, others)
                fits = costs.peak_bytes <= budget_bytes
                if fits and costs.device_seconds < base.device_seconds:
                    size = sum(map(graph.bytes_of, values))
                    found[place] = graph.operations[place].name, size
    return list(found.values())


def _results(graph: Graph, place: int) -> list[tuple[int, ...]]:
    made = graph.operations[place].makes
    values = tuple(value for value in made if graph.values[value].holdable)
    return [values, *((v,) for v in values if len(values) > 1)] if values else []

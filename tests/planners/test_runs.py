"""Regions stay within a run: one call of the model, one unit of FSDP2 in it."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from recoup.core.graph import Graph
from recoup.core.segments import Action, Segment, within_runs
from recoup.core.simulation import simulate
from recoup.planners.search import Search
from tests.support.graphs import graphs, plans

ALLOW = frozenset({Action.KEEP})


@st.composite
def divided(draw: st.DrawFn) -> Graph:
    """Return a graph whose operations are in units, some in several."""
    graph = draw(graphs())
    places = st.integers(1, len(graph.boundaries) - 1)
    begins = sorted(draw(st.sets(places, max_size=3)))
    names = draw(st.permutations(["", "layers.0", "layers.1", None]))
    return replace(
        graph,
        boundaries=tuple(
            replace(boundary, unit=names[sum(begin <= n for begin in begins)])
            for n, boundary in enumerate(graph.boundaries)
        ),
    )


def flattened(segments: Iterable[Segment]) -> Iterator[Segment]:
    for segment in segments:
        yield segment
        yield from flattened(segment.inner)


def is_in_one_unit(graph: Graph, segment: Segment) -> bool:
    units = {b.unit for b in graph.boundaries[segment.start : segment.stop]}
    return len(units) == 1 and None not in units


@given(divided(), st.floats(0, 1))
def test_no_segment_of_a_plan_is_in_several_units(graph, share):
    search = Search(graph, ALLOW)
    floor, plain = search.floor.costs.peak_bytes, search.plain_bytes
    budget = round(floor + share * (plain - floor))
    found = search.solve(budget, 0.0)
    assert found is not None, "the floor is feasible"
    for plan in (search.floor, found):
        assert all(is_in_one_unit(graph, s) for s in flattened(plan.segments))
        assert simulate(graph, plan.segments).peak_bytes == plan.costs.peak_bytes
    assert found.costs.peak_bytes <= budget


@given(st.data())
def test_segments_are_split_where_units_change_and_lose_nothing_else(data):
    graph = data.draw(divided())
    segments = data.draw(plans(graph))
    parts = within_runs(graph, segments)

    def covered(some: Iterable[Segment]) -> set[int]:
        return {n for s in some for n in range(s.start, s.stop) if graph.runs[n] >= 0}

    assert all(is_in_one_unit(graph, s) for s in flattened(parts))
    assert covered(parts) == covered(segments)
    held = {v for s in flattened(segments) for v in s.actions}
    assert {v for s in flattened(parts) for v in s.actions} <= held


def test_a_graph_without_units_is_one_run():
    graph = Graph((), 0, (), (), (), (), ())
    assert graph.runs == ()
    assert within_runs(graph, [Segment(0, 3)]) == (Segment(0, 3),)

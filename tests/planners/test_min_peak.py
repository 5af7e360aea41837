"""The plan with the minimum peak: the same for every measurement of one step."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.graphs import transformer_graph
from recoup.core.graph import Graph
from recoup.core.segments import Action
from recoup.core.simulation import simulate
from recoup.planners.planner import plan
from recoup.planners.search import Search
from tests.support.graphs import graphs

KEEP = frozenset({Action.KEEP})


def measured_again(graph: Graph, seconds: list[float]) -> Graph:
    """Return the step with other times."""
    return replace(
        graph,
        operations=tuple(
            replace(operation, seconds=seconds[number % len(seconds)])
            for number, operation in enumerate(graph.operations)
        ),
        recording_seconds=seconds[0] / 100,
        step_seconds=sum(seconds),
    )


@settings(max_examples=30, deadline=None)
@given(graph=graphs(), times=st.lists(st.floats(0.1, 9), min_size=1, max_size=7))
def test_the_floor_does_not_depend_on_times(graph, times):
    first = Search(graph, KEEP).floor
    again = Search(measured_again(graph, times), KEEP).floor
    assert first[0] == again[0]
    assert first[1].bytes_at == again[1].bytes_at


@pytest.mark.parametrize("seed", range(2))
def test_the_floor_of_a_transformer_does_not_depend_on_times(seed):
    graph = transformer_graph(3)
    times = [1.0 + (seed + 1) * (n * 7919 % 13) for n in range(11)]
    first = Search(graph, KEEP).floor
    assert Search(measured_again(graph, times), KEEP).floor[0] == first[0]


def test_a_plan_for_the_floor_stays_within_it():
    graph = transformer_graph(3)
    for times in ([1.0, 5.0, 2.0], [3.0, 1.0]):
        again = measured_again(graph, times)
        floor_bytes = Search(graph, KEEP).floor[1].peak_bytes
        found = plan(again, floor_bytes, allow=KEEP)
        assert simulate(again, found.segments).peak_bytes <= floor_bytes

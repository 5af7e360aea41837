"""The lower bounds hold for all plans of small graphs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.core.simulation import simulate
from recoup.planners.bounds import bound_seconds, knapsack_bound
from tests.support.graphs import graphs, plans


@settings(max_examples=100)
@given(st.data())
def test_no_plan_with_any_segments_is_below_the_bound(data):
    graph = data.draw(graphs())
    found = simulate(graph, data.draw(plans(graph)))
    assert found.replay_seconds >= bound_seconds(graph, found.peak_bytes) - 1e-6


@settings(max_examples=50)
@given(st.data())
def test_no_plan_is_below_the_knapsack_bound_of_any_moment(data):
    graph = data.draw(graphs())
    found = simulate(graph, data.draw(plans(graph)))
    for moment in range(graph.moments):
        bound = knapsack_bound(graph, found.peak_bytes, moment)
        assert found.replay_seconds >= bound - 1e-9


@given(graphs())
def test_the_bound_of_plain_training_is_zero(graph):
    assert bound_seconds(graph, simulate(graph, ()).peak_bytes) == 0

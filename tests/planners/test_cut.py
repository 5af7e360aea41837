"""The minimum cut versus every set of values to hold."""

import itertools

import pytest
from hypothesis import given, settings

from benchmarks.graphs import Kernel, step_graph
from recoup.planners.min_cut import Demand, choose, evaluate, frontier_of
from tests.support.graphs import graphs, hold_sets


def whole_demand(graph):
    """Return the demand of backward on all of forward."""
    saved = dict.fromkeys(save.value for save in graph.saves)
    made = tuple(v for v in saved if graph.values[v].producer >= 0)
    return Demand(graph, range(len(graph.operations)), made, {0: 0})


def every_choice(demand):
    last = len(demand.graph.boundaries) - 1
    return [evaluate(demand, held) for held in hold_sets(demand.graph, 0, last)]


@settings(max_examples=60)
@given(graphs())
def test_at_any_price_no_set_of_values_is_cheaper_than_the_cut(graph):
    demand = whole_demand(graph)
    for price in (0.01, 0.05, 0.2, 1.0):
        found = evaluate(demand, choose(demand, price))
        best = min(c.seconds + price * c.held_bytes for c in every_choice(demand))
        # Capacities are rounded to 2**-30 of their sum.
        assert found.seconds + price * found.held_bytes == pytest.approx(best)


@settings(max_examples=60)
@given(graphs())
def test_the_corners_are_the_lower_convex_hull_of_all_choices(graph):
    demand = whole_demand(graph)
    corners = frontier_of(demand, limit=100)
    bytes_held = [corner.held_bytes for corner in corners]
    assert bytes_held == sorted(bytes_held, reverse=True)
    for choice in every_choice(demand):
        for left, right in itertools.pairwise(corners):
            slope = (right.seconds - left.seconds) / (
                left.held_bytes - right.held_bytes
            )
            line = left.seconds + slope * (left.held_bytes - choice.held_bytes)
            assert choice.seconds >= line - 1e-6


@given(graphs())
def test_chosen_values_are_holdable(graph):
    demand = whole_demand(graph)
    for corner in frontier_of(demand):
        assert all(graph.values[value].holdable for value in corner.held)


def test_holding_a_resident_value_costs_nothing():
    kernels = [Kernel(f"op{n}", 1.0, (n - 1,), 100, (n,)) for n in range(3)]
    graph = step_graph(kernels, [0, 3])
    free = Demand(graph, range(3), (1, 2, 3), {2: 0})
    assert all(2 in corner.held for corner in frontier_of(free))


def test_results_that_cannot_be_recomputed_are_held_at_their_price():
    kernels = [
        Kernel("random", 1.0, (-1,), 100, (0,), replayable=False),
        Kernel("cheap", 1.0, (0,), 100, (1,)),
    ]
    graph = step_graph(kernels, [0, 2])
    corners = frontier_of(Demand(graph, range(2), (1, 2), {}))
    assert corners[-1].held_bytes == 100
    assert corners[-1].seconds == 1.0

"""Versus exhaustive search: plans of small graphs are optimal."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.core.segments import Action, Segment
from recoup.core.simulation import simulate
from recoup.errors import InfeasibleError
from recoup.planners.baselines import blocks_of
from recoup.planners.exhaustive import exhaustive
from recoup.planners.interval_options import segments_of
from recoup.planners.linear_program import OneLevel
from recoup.planners.planner import plan
from tests.support.graphs import graphs, hold_sets

KEEP = frozenset({Action.KEEP})


def every_plan(graph):
    """Simulate every choice of no segment or any hold set, block by block."""
    ways = [
        [
            (),
            *(
                (Segment(start, stop, dict.fromkeys(held, Action.KEEP)),)
                for held in hold_sets(graph, start, stop)
            ),
        ]
        for start, stop in blocks_of(graph)
    ]
    return [
        simulate(graph, [segment for way in choice for segment in way])
        for choice in product(*ways)
    ]


@settings(max_examples=20)
@given(graphs(most=6), st.integers(0, 4))
def test_a_small_graph_gets_a_plan_as_fast_as_any_over_its_blocks(graph, quarters):
    every = every_plan(graph)
    lowest = min(found.peak_bytes for found in every)
    highest = simulate(graph, ()).peak_bytes
    budget_bytes = lowest + (highest - lowest) * quarters // 4
    best = min(f.replay_seconds for f in every if f.peak_bytes <= budget_bytes)
    segments = exhaustive(graph, blocks_of(graph), budget_bytes)
    assert segments is not None
    assert simulate(graph, segments).replay_seconds == best
    # Other cuts and nested segments may be faster; never slower.
    solution = plan(graph, budget_bytes, allow=KEEP)
    assert solution.simulation.peak_bytes <= budget_bytes
    assert solution.extra_seconds <= best
    assert solution.extra_seconds >= solution.bound_seconds - 1e-6


@settings(max_examples=20)
@given(graphs(most=6), st.integers(0, 4))
def test_the_linear_program_never_beats_the_optimum(graph, quarters):
    every = every_plan(graph)
    lowest = min(found.peak_bytes for found in every)
    highest = simulate(graph, ()).peak_bytes
    budget_bytes = lowest + (highest - lowest) * quarters // 4
    found = OneLevel(graph, blocks_of(graph), KEEP).solve(budget_bytes)
    if found is not None:
        costs = simulate(graph, segments_of(found))
        assert costs.peak_bytes <= budget_bytes
        best = min(f.replay_seconds for f in every if f.peak_bytes <= budget_bytes)
        assert costs.replay_seconds >= best


@settings(max_examples=10)
@given(graphs(most=6))
def test_no_plan_over_the_blocks_is_below_the_floor(graph):
    lowest = min(found.peak_bytes for found in every_plan(graph))
    with pytest.raises(InfeasibleError) as caught:
        plan(graph, 0, allow=KEEP)
    assert 0 < caught.value.floor_bytes <= lowest


@given(graphs(most=6))
def test_too_many_plans_are_not_tried(graph):
    assert exhaustive(graph, blocks_of(graph), 10**9, most=1) is None

"""Refined plans keep all that fits: no further recomputed result could be kept."""

from time import perf_counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.graphs import transformer_graph
from recoup.core.segments import Action
from recoup.core.simulation import simulate
from recoup.planners.baselines import recompute_all
from recoup.planners.planner import floor, plan, plan_with
from recoup.planners.refine import refine
from recoup.planners.search import Search
from tests.support.graphs import graphs, plans
from tests.support.keeping import keepable

KEEP = frozenset({Action.KEEP})


@settings(max_examples=25, deadline=None)
@given(graph=graphs(most=10), share=st.floats(0, 1))
def test_no_recomputed_result_could_be_kept_in_addition(graph, share):
    lowest = floor(graph, allow=KEEP).peak_bytes
    highest = simulate(graph, ()).peak_bytes
    budget_bytes = lowest + int(share * (highest - lowest))
    found = plan(graph, budget_bytes, allow=KEEP)
    assert keepable(graph, found.segments, budget_bytes) == []


@settings(max_examples=40, deadline=None)
@given(data=st.data(), graph=graphs(most=12), room=st.integers(0, 200))
def test_a_refined_plan_fits_is_no_slower_and_leaves_no_room(data, graph, room):
    segments = data.draw(plans(graph, depth=1))
    before = simulate(graph, segments)
    budget_bytes = before.peak_bytes + room
    refined = refine(graph, segments, budget_bytes, swaps=data.draw(st.booleans()))
    after = simulate(graph, refined)
    assert after.peak_bytes <= budget_bytes
    assert after.replay_seconds <= before.replay_seconds
    assert keepable(graph, refined, budget_bytes) == []


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_no_recomputed_result_could_be_kept_after_the_deadline(share):
    graph = transformer_graph(3)
    budget_bytes = int(share * simulate(graph, ()).peak_bytes)
    search = Search(graph, KEEP)
    found = plan_with(search, budget_bytes, until=perf_counter())
    assert keepable(graph, found.segments, budget_bytes) == []


def test_the_check_finds_a_result_that_could_be_kept():
    graph = transformer_graph(2)
    everything = recompute_all(graph)
    highest = simulate(graph, ()).peak_bytes
    assert keepable(graph, everything, highest)
    assert keepable(graph, everything, simulate(graph, everything).peak_bytes - 1) == []

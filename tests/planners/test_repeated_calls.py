"""Plans that repeat whole calls: they fit, and no repeated call is superfluous."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import nn

import recoup
from recoup.core.graph import Graph
from recoup.core.plan import locate, measured_order, plan_for
from recoup.core.segments import Segment
from recoup.core.simulation import simulate
from recoup.planners.planner import plan_with
from recoup.planners.repeated_calls import repeat_calls, repeatable_calls
from recoup.planners.search import Search


def graph_of(widths: list[int]) -> Graph:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))
        for width in widths
    ]
    model, batch = nn.Sequential(*layers), torch.randn(64, 8)
    graph = recoup.measure(model, batch, loss=torch.sum)
    return replace(graph, repeatable=frozenset(call.module for call in graph.calls))


GRAPHS = [graph_of([32] * 5), graph_of([8, 64, 16, 48, 32])]


def peak(graph: Graph, calls: tuple[int, ...]) -> int:
    known = repeatable_calls(graph)
    return simulate(
        graph,
        [Segment(known[n].start, known[n].stop, by_call=True) for n in calls],
    ).peak_bytes


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("share", [0.55, 0.6, 0.7, 0.8, 0.9, 0.99])
def test_no_repeated_call_is_superfluous(graph, share):
    budget = int(share * graph.peak_bytes)
    numbers = range(len(repeatable_calls(graph)))
    subsets = [c for n in range(6) for c in combinations(numbers, n)]
    fitting = [calls for calls in subsets if peak(graph, calls) <= budget]
    found = repeat_calls(graph, budget)
    if found is None:
        assert tuple(numbers) not in fitting
        return
    assert simulate(graph, found).peak_bytes <= budget
    if graph is GRAPHS[0]:  # of equal calls the fewest are repeated
        assert len(found) == min(map(len, fitting))
    starts = [call.start for call in repeatable_calls(graph)]
    chosen = tuple(starts.index(segment.start) for segment in found)
    assert not [c for c in fitting if set(c) < set(chosen)]


def test_a_repeated_call_runs_as_a_whole_and_records_nothing():
    graph = GRAPHS[0]
    calls = repeatable_calls(graph)
    found = simulate(graph, [Segment(calls[1].start, calls[1].stop, by_call=True)])
    (replay,) = found.replays
    inside = graph.operations_between(calls[1].start, calls[1].stop)
    assert replay.operations == tuple(inside)
    assert found.recording_seconds == 0
    assert found.peak_bytes < graph.peak_bytes


def test_calls_with_state_or_unrepeatable_operators_are_not_repeated():
    graph = GRAPHS[0]
    first = graph.operations_between(graph.calls[0].start, graph.calls[0].stop)
    operations = list(graph.operations)
    operations[first[0]] = replace(operations[first[0]], state_bytes=8)
    second = graph.operations_between(graph.calls[1].start, graph.calls[1].stop)
    operations[second[0]] = replace(operations[second[0]], replayable=False)
    changed = replace(graph, operations=tuple(operations))
    assert repeatable_calls(changed) == repeatable_calls(graph)[2:]


def test_without_a_proof_no_call_is_repeated():
    graph = replace(GRAPHS[0], repeatable=frozenset())
    assert repeat_calls(graph, graph.peak_bytes // 2) is None


def test_a_plan_names_the_call_and_is_located():
    graph = GRAPHS[0]
    segments = repeat_calls(graph, int(0.7 * graph.peak_bytes))
    assert segments
    plan = plan_for(graph, segments)
    assert locate(graph, plan) == segments
    spans = [(s.start.module, s.start.entering, s.stop.entering) for s in plan.spans]
    assert spans == [(s.start.module, True, False) for s in plan.spans]
    places = [place for span in plan.spans for place in (span.start, span.stop)]
    assert list(measured_order(graph, plan)) == places


def test_the_search_repeats_calls_where_recording_takes_longer():
    slow = replace(GRAPHS[0], recording_seconds=1.0)
    budget = int(0.7 * slow.peak_bytes)
    solution = plan_with(Search(slow, frozenset({recoup.Action.KEEP})), budget)
    assert solution.planner == "repeated calls"
    free = replace(GRAPHS[0], recording_seconds=0.0)
    solution = plan_with(Search(free, frozenset({recoup.Action.KEEP})), budget)
    assert solution.planner != "repeated calls"

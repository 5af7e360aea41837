"""A plan is located in the step it was made for, and refused in another."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recoup.core.plan import Place, Plan, Span, locate, plan_for
from recoup.core.segments import Action, Segment
from recoup.core.simulation import simulate
from recoup.errors import PlanError
from recoup.planners.planner import frontier
from tests.support.findings import small_graph


@given(data=st.data())
def test_locate_is_the_inverse_of_plan_for(data):
    graph = small_graph()
    last = len(graph.boundaries) - 1
    cuts = sorted(data.draw(st.sets(st.integers(0, last), min_size=2, max_size=6)))
    segments = []
    for start, stop in zip(cuts[::2], cuts[1::2], strict=False):
        made = [
            value
            for number in graph.operations_between(start, stop)
            for value in graph.operations[number].makes
        ]
        held = data.draw(st.sets(st.sampled_from(made))) if made else set()
        action = data.draw(st.sampled_from(Action))
        segments.append(Segment(start, stop, actions=dict.fromkeys(held, action)))
    made_plan = plan_for(graph, segments)
    found = locate(graph, made_plan)
    assert plan_for(graph, found) == made_plan
    assert simulate(graph, found) == simulate(graph, segments)


def test_nested_plans_are_located():
    graph = small_graph()
    whole = Segment(0, len(graph.boundaries) - 1, inner=(Segment(0, 2), Segment(2, 4)))
    assert locate(graph, plan_for(graph, [whole])) == (whole,)


def test_plans_of_a_frontier_are_located():
    graph = small_graph()
    for solution in frontier(graph, points=3):
        found = locate(graph, plan_for(graph, solution.segments))
        assert simulate(graph, found) == solution.simulation


def test_a_plan_for_another_model_is_refused():
    nowhere = Span(Place("missing", 0, True), Place("too", 0, False))
    with pytest.raises(PlanError, match="the start of missing"):
        locate(small_graph(), Plan((nowhere,)))


def test_a_span_that_ends_before_it_begins_is_refused():
    graph = small_graph()
    first, last = graph.boundaries[0], graph.boundaries[-1]
    start = Place(last.module, last.call, last.entering)
    stop = Place(first.module, first.call, first.entering)
    with pytest.raises(PlanError, match="another order"):
        locate(graph, Plan((Span(start, stop),)))

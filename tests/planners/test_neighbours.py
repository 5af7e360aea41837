"""Plans for neighbouring budgets: more memory does not take much more time."""

import random
from dataclasses import replace

import recoup
from benchmarks.zoo.cases import CASES
from recoup.core.graph import Graph
from recoup.core.segments import Action
from recoup.planners.planner import plan
from recoup.planners.search import Search

KEEP = frozenset({Action.KEEP})


def uneven_step() -> Graph:
    """Return the step of a U-Net in which few operators take most of the time."""
    case = CASES["u-net"]
    graph = recoup.measure(
        case.build("tiny"), case.batch("tiny"), loss=case.loss, dry=True, device="h200"
    )
    draw = random.Random(3)
    operations = tuple(
        replace(operation, seconds=draw.paretovariate(0.6))
        for operation in graph.operations
    )
    forward = sum(operation.seconds for operation in operations)
    return replace(graph, operations=operations, step_seconds=2 * forward)


def test_nesting_is_tried_where_flat_plans_barely_fit():
    graph = uneven_step()
    search = Search(graph, KEEP)
    least, most = search.floor[1].peak_bytes, search.known[0][1].peak_bytes
    seconds = [
        plan(graph, least + (most - least) * part // 60, allow=KEEP).simulation.seconds
        for part in (8, 10)
    ]
    # Without nesting the second one takes a third of a step longer.
    assert seconds[1] <= seconds[0] + 0.01 * graph.step_seconds


def test_one_search_never_returns_a_slower_plan_for_more_memory():
    graph = uneven_step()
    search = Search(graph, KEEP)
    least, most = search.floor[1].peak_bytes, search.known[0][1].peak_bytes
    seconds = []
    for part in (20, 21, 22, 24):
        budget_bytes = least + (most - least) * part // 60
        found = search.solve(budget_bytes, search.bound_seconds(budget_bytes))
        assert found is not None
        seconds.append(found[1].seconds)
    assert seconds == sorted(seconds, reverse=True)

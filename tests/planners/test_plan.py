"""The front door: what comes back fits, is checked, and is as fast as can be shown."""

import pytest

from benchmarks.graphs import transformer_graph
from recoup.core.errors import InfeasibleError
from recoup.core.segments import Action
from recoup.core.simulation import simulate
from recoup.planners.plan import plan

KEEP = frozenset({Action.KEEP})


@pytest.fixture(scope="module")
def graph():
    return transformer_graph(6)


@pytest.mark.parametrize("share", [1.0, 0.9, 0.75, 0.6, 0.5, 0.4, 0.3])
def test_the_simulated_peak_is_within_the_budget(graph, share):
    budget_bytes = int(share * simulate(graph, ()).peak_bytes)
    solution = plan(graph, budget_bytes, allow=KEEP)
    assert simulate(graph, solution.segments) == solution.simulation
    assert solution.simulation.peak_bytes <= budget_bytes


def test_a_budget_that_plain_training_meets_costs_nothing(graph):
    solution = plan(graph, simulate(graph, ()).peak_bytes)
    assert solution.segments == ()
    assert solution.extra_seconds == 0


def test_an_impossible_budget_names_the_smallest_that_is_possible(graph):
    with pytest.raises(InfeasibleError, match="smallest plan") as caught:
        plan(graph, 1000)
    floor_bytes = caught.value.floor_bytes
    assert plan(graph, floor_bytes).simulation.peak_bytes <= floor_bytes
    with pytest.raises(InfeasibleError):
        plan(graph, floor_bytes - 1)

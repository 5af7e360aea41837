"""Real traces: recomputing less than DTR and no more than one global cut.

The numbers are percent of the step's compute, from the traces' README: what DTR's own
simulator reports and what a single minimum cut over the whole graph reaches, at budgets
that are shares of DTR's baseline.
"""

import pytest

from benchmarks.traces import BASELINES, CELLS, percent
from recoup.core.segments import Action
from recoup.core.simulation import simulate
from recoup.planners.planner import plan
from tests.support.dtr import has_traces, read_trace

KEEP = frozenset({Action.KEEP})
# The rounding of the published figures; the second is a near miss that is known: the
# values to choose from are 168 MB each, and 1.35 % is what fits.
ROUNDING = 0.005
KNOWN_MISSES = {("transformer", 0.8): 0.01}

pytestmark = pytest.mark.skipif(not has_traces(), reason="the traces are not there")


@pytest.mark.parametrize("name", BASELINES)
def test_the_liveness_model_is_near_that_of_dtr(name):
    graph = read_trace(name)
    peak = simulate(graph, ()).peak_bytes
    assert peak == pytest.approx(BASELINES[name].peak_megabytes * 1e6, rel=0.06)


def check(name, share):
    graph = read_trace(name)
    cell = CELLS[name, share]
    budget_bytes = int(share * BASELINES[name].peak_megabytes * 1e6)
    solution = plan(graph, budget_bytes, allow=KEEP)
    assert simulate(graph, solution.segments).peak_bytes <= budget_bytes
    found = percent(name, solution.extra_seconds)
    assert found < cell.dtr
    assert found >= percent(name, solution.bound_seconds)
    if cell.cut is not None:
        assert found <= cell.cut + KNOWN_MISSES.get((name, share), ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "share"), [("unet", 0.5), ("resnet32", 0.2), ("transformer", 0.4)]
)
def test_less_is_recomputed_than_with_dtr_and_with_a_global_cut(name, share):
    check(name, share)


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "share"), CELLS)
def test_less_is_recomputed_in_every_cell(name, share):
    check(name, share)

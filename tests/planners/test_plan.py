"""The entry point: plans fit, are checked, and are close to the lower bound."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.graphs import transformer_graph
from recoup.core.footprint import footprint, total_footprint
from recoup.core.graph import HostCosts
from recoup.core.segments import REGION_OPERATORS, Action
from recoup.core.simulation import simulate
from recoup.core.trim_segments import narrowed
from recoup.errors import InfeasibleError, UsageError
from recoup.planners.baselines import every_kth, greedy, recompute_all, square_root
from recoup.planners.planner import floor, frontier, plan, plan_with
from recoup.planners.search import Search
from tests.support.graphs import graphs
from tests.support.work import calls_of

KEEP = frozenset({Action.KEEP})


@pytest.fixture(scope="module")
def graph():
    return transformer_graph(6)


@pytest.mark.parametrize("points", [0, -1, 2.5, True, "3"])
def test_a_frontier_has_a_positive_number_of_points(graph, points):
    with pytest.raises(UsageError, match="expected points of at least 1, got"):
        frontier(graph, points=points)


def test_a_plan_is_made_for_a_graph():
    with pytest.raises(UsageError, match="expected the Graph of a measured step, got"):
        plan("model", 1)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6, 0.5])
def test_regions_cover_only_recomputed_operators(graph, share):
    budget_bytes = int(share * simulate(graph, ()).peak_bytes)
    segments = plan(graph, budget_bytes, allow=KEEP).segments
    assert segments
    for segment in segments:
        assert narrowed(graph, segment) == (segment,)
        assert footprint(graph, segment).replays


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


def test_the_error_for_an_infeasible_budget_names_the_smallest_feasible_one(graph):
    with pytest.raises(InfeasibleError, match="smallest plan") as caught:
        plan(graph, 1000)
    floor_bytes = caught.value.floor_bytes
    assert plan(graph, floor_bytes).simulation.peak_bytes <= floor_bytes
    # Where both print the same, the message gives bytes.
    with pytest.raises(InfeasibleError, match=f" {floor_bytes - 1} B cannot be met"):
        plan(graph, floor_bytes - 1)


def test_the_error_says_where_the_peak_is_and_what_holds_it(graph):
    with pytest.raises(InfeasibleError) as caught:
        plan(graph, 1000)
    error = caught.value
    assert error.budget_bytes == 1000
    lowest = floor(graph).simulation
    assert error.floor_bytes == lowest.peak_bytes
    assert error.moment == lowest.peak_moment
    assert sum(size for _, size in error.holders) >= error.floor_bytes
    sizes = [size for _, size in error.holders]
    assert sizes == sorted(sizes, reverse=True)
    assert str(error.floor_bytes) in str(error)


def test_nested_segments_reach_lower_peaks_than_one_level_of_blocks(graph):
    blocks_only = simulate(graph, recompute_all(graph)).peak_bytes
    lowest = floor(graph).simulation.peak_bytes
    assert lowest < blocks_only
    solution = plan(graph, (lowest + blocks_only) // 2, allow=KEEP)
    assert solution.simulation.peak_bytes <= (lowest + blocks_only) // 2


def test_more_memory_is_always_faster_on_the_frontier(graph):
    solutions = frontier(graph, points=6, allow=KEEP)
    assert len(solutions) >= 4
    for less, more in pairwise(solutions):
        assert less.simulation.peak_bytes < more.simulation.peak_bytes
        assert less.simulation.seconds > more.simulation.seconds
    assert solutions[-1].extra_seconds == 0
    assert solutions[0].simulation.peak_bytes == floor(graph).simulation.peak_bytes


@settings(max_examples=40, deadline=None)
@given(graph=graphs(most=10), shares=st.lists(st.floats(0, 1), min_size=2, max_size=4))
def test_a_search_never_returns_slower_plans_for_more_memory(graph, shares):
    """In any order: a plan found for one budget is known for all larger ones."""
    search = Search(graph, KEEP)
    highest = simulate(graph, ()).peak_bytes
    lowest = search.floor[1].peak_bytes
    budgets = [lowest + int(share * (highest - lowest)) for share in shares]
    for budget_bytes in budgets:
        plan_with(search, budget_bytes)
    again = [plan_with(search, b).simulation.seconds for b in sorted(budgets)]
    assert again == sorted(again, reverse=True)


def test_separately_made_plans_of_a_transformer_are_faster_with_more_memory(graph):
    highest = simulate(graph, ()).peak_bytes
    lowest = floor(graph, allow=KEEP).simulation.peak_bytes
    budgets = [lowest + (highest - lowest) * n // 9 for n in range(10)]
    times = [plan(graph, b, allow=KEEP).simulation.seconds for b in budgets]
    assert times == sorted(times, reverse=True)


def test_the_order_of_budgets_does_not_change_the_curve_of_a_search(graph):
    highest = simulate(graph, ()).peak_bytes
    lowest = floor(graph, allow=KEEP).simulation.peak_bytes
    budgets = [lowest + (highest - lowest) * n // 5 for n in (4, 1, 5, 0, 2, 3)]
    search = Search(graph, KEEP)
    for budget_bytes in budgets:
        plan_with(search, budget_bytes)
    again = [plan_with(search, b).simulation.seconds for b in sorted(budgets)]
    assert again == sorted(again, reverse=True)


@pytest.mark.parametrize("share", [0.75, 0.5, 0.3])
def test_no_baseline_is_faster_at_the_same_peak(graph, share):
    budget_bytes = int(share * simulate(graph, ()).peak_bytes)
    solution = plan(graph, budget_bytes, allow=KEEP)
    baselines = [recompute_all(graph), square_root(graph), every_kth(graph, 2)]
    baselines.append(greedy(graph, budget_bytes))
    for segments in baselines:
        found = simulate(graph, segments)
        if found.peak_bytes <= budget_bytes:
            assert solution.simulation.seconds <= found.seconds


def test_a_fast_link_replaces_replays():
    slow = transformer_graph(4)
    fast = transformer_graph(4, link_bytes_per_second=1e12)
    budget_bytes = int(0.5 * simulate(slow, ()).peak_bytes)
    without = plan(slow, budget_bytes)
    offloading = plan(fast, budget_bytes)
    assert without.simulation.host_bytes == 0
    assert offloading.simulation.host_bytes > 0
    assert offloading.extra_seconds < without.extra_seconds
    assert offloading.extra_seconds >= offloading.bound_seconds - 1e-6
    assert plan(fast, budget_bytes, allow=KEEP).simulation.host_bytes == 0


@pytest.mark.slow
def test_planning_a_hundred_blocks_takes_at_most_twice_the_calls_of_fifty():
    calls = {}
    for blocks in (50, 100):
        graph = transformer_graph(blocks)
        budget_bytes = simulate(graph, ()).peak_bytes // 2
        found = []
        calls[blocks] = calls_of(
            lambda graph=graph, budget_bytes=budget_bytes, found=found: found.append(
                plan(graph, budget_bytes, allow=KEEP)
            )
        )
        assert found[0].gap < 0.01
    assert calls[100] <= 2 * calls[50]
    # 390 of each operator: about a second on a quiet core.
    assert calls[100] <= 600 * len(graph.operations)


def beside_host(graph, *, plain, recording=0.0, replaying=0.0):
    """Return the graph with a host of these shares of the plain step's time."""
    count = len(graph.operations)
    seconds = graph.step_seconds
    return replace(
        graph,
        host_costs=HostCosts(
            plain * seconds, recording * seconds / count, replaying * seconds / count
        ),
    )


def test_a_step_takes_the_time_of_the_slower_of_device_and_host(graph):
    segments = recompute_all(graph)
    alone = simulate(graph, segments)
    count = len(graph.operations)
    replayed = sum(len(replay.operations) for replay in alone.replays)
    assert 0 < replayed < count
    for plain in (0.5, 1.0, 2.0):
        found = simulate(
            beside_host(graph, plain=plain, recording=0.25, replaying=0.5), segments
        )
        recorded = count + REGION_OPERATORS * len(segments)
        host = plain + 0.25 * recorded / count + 0.5 * replayed / count
        assert found.host_seconds == pytest.approx(host * graph.step_seconds)
        assert found.device_seconds == alone.seconds
        assert found.seconds == max(alone.seconds, found.host_seconds)


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6, 0.5])
def test_a_fast_host_records_less_at_negligible_device_time(graph, share):
    budget_bytes = int(share * simulate(graph, ()).peak_bytes)
    beside = beside_host(graph, plain=0.2, recording=0.1, replaying=0.1)
    alone = plan(graph, budget_bytes, allow=KEEP)
    found = plan(beside, budget_bytes, allow=KEEP)
    assert found.simulation.seconds <= 1.002 * alone.simulation.seconds
    assert found.gap <= alone.gap + 0.002
    recorded = total_footprint(graph, found.segments).recorded
    assert recorded <= total_footprint(graph, alone.segments).recorded


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6, 0.5])
def test_a_slow_host_records_less_and_no_more_than_needed(graph, share):
    budget_bytes = int(share * simulate(graph, ()).peak_bytes)
    slow = beside_host(graph, plain=0.9, recording=1.0, replaying=0.5)
    alone = plan(graph, budget_bytes, allow=KEEP).segments
    found = plan(slow, budget_bytes, allow=KEEP)
    assert found.simulation.peak_bytes <= budget_bytes
    assert found.simulation.seconds < simulate(slow, alone).seconds
    recorded = total_footprint(graph, found.segments).recorded
    assert recorded < total_footprint(graph, alone).recorded


@settings(max_examples=40, deadline=None)
@given(graph=graphs(awkward=False), data=st.data())
def test_no_plan_beats_the_bound_with_any_host(graph, data):
    third = st.sampled_from([0.0, 0.3, 1.0, 3.0])
    beside = beside_host(
        graph, plain=data.draw(third), recording=data.draw(third), replaying=0.3
    )
    plain = simulate(beside, ())
    lowest = floor(beside, allow=KEEP).simulation.peak_bytes
    budget_bytes = data.draw(st.integers(lowest, plain.peak_bytes))
    found = plan(beside, budget_bytes, allow=KEEP)
    assert found.simulation.peak_bytes <= budget_bytes
    assert found.extra_seconds >= found.bound_seconds * (1 - 1e-9) - 1e-12
    assert 0 <= found.gap < 1
    assert found.simulation.seconds >= plain.seconds


def test_after_its_deadline_a_search_accepts_the_first_plan_that_fits(graph):
    budget_bytes = int(0.5 * simulate(graph, ()).peak_bytes)
    hasty = Search(graph, KEEP)
    found = plan_with(hasty, budget_bytes, until=0.0)
    assert found.simulation.peak_bytes <= budget_bytes
    patient = Search(graph, KEEP)
    assert plan_with(patient, budget_bytes).simulation.seconds <= (
        found.simulation.seconds
    )
    assert len(hasty.known) < len(patient.known)


def test_after_its_deadline_a_search_still_finds_the_floor(graph):
    lowest = floor(graph, allow=KEEP).simulation.peak_bytes
    found = plan_with(Search(graph, KEEP), lowest, until=0.0)
    assert found.simulation.peak_bytes <= lowest

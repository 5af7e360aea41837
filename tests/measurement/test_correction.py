"""Corrected times: what a graph says a step takes is what it was seen to take."""

from dataclasses import replace

import pytest

from benchmarks.graphs import transformer_graph
from benchmarks.zoo.cases import CASES
from recoup.core.graph import HostCosts
from recoup.core.simulation import simulate
from recoup.measurement.steps.floor import measure_floor
from recoup.measurement.steps.training_step import training_step
from recoup.measurement.timing.host_cost import (
    calibrated,
    compared,
    corrected,
    host_costs_of,
)
from recoup.measurement.timing.pace import Pace
from recoup.planners.baselines import recompute_all


def unmeasured():
    """Return a graph whose operators take a second each, and the floor's time of it."""
    case = CASES["llama"]
    step = training_step(case.build("tiny"), case.batch("tiny"), loss=case.loss)
    graph = measure_floor(step)
    graph = replace(
        graph,
        operations=tuple(replace(each, seconds=1.0) for each in graph.operations),
        step_seconds=3.0 * len(graph.operations),
        recording_seconds=0.0,
    )
    return graph, simulate(graph, recompute_all(graph)).seconds


def test_what_operators_do_not_explain_is_in_the_plain_step_too():
    graph, explained = unmeasured()
    found = calibrated(graph, 1.5 * explained)
    assert simulate(found, recompute_all(found)).seconds == 1.5 * explained
    assert simulate(found, ()).seconds == graph.step_seconds + 0.5 * explained


def test_operators_that_take_longer_than_the_step_overlapped_in_it():
    graph, explained = unmeasured()
    found = calibrated(graph, explained / 2)
    assert simulate(found, recompute_all(found)).seconds == pytest.approx(explained / 2)
    assert simulate(found, ()).seconds == pytest.approx(graph.step_seconds / 2)


@pytest.mark.parametrize("share", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("host_share", [0.1, 0.9, 1.0])
def test_the_floor_is_predicted_as_it_was_measured_beside_a_host(share, host_share):
    graph, explained = unmeasured()
    measured = share * explained
    pace = Pace(measured, host_share * measured)
    host_costs = host_costs_of(
        graph, pace, plain_forward_seconds=0.2 * pace.host_seconds
    )
    graph = replace(graph, host_costs=host_costs)
    found = corrected(graph, [recompute_all(graph)], pace)
    costs = simulate(found, recompute_all(found))
    if pace.is_bound_by_host:
        assert costs.host_seconds == pytest.approx(pace.host_seconds)
    assert costs.host_seconds <= pace.host_seconds * (1 + 1e-9)
    assert costs.seconds == pytest.approx(measured)
    plain = simulate(found, ())
    assert plain.host_seconds == pytest.approx(0.5 * pace.host_seconds)
    if host_share == 1.0 and share > 1:
        assert plain.device_seconds == graph.step_seconds


@pytest.mark.parametrize("device_share", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("host_share", [0.1, 0.6, 1.0, 4.0])
def test_a_plan_that_ran_is_predicted_as_it_ran(device_share, host_share):
    graph = transformer_graph(4)
    thought = HostCosts(0.5 * graph.step_seconds, 1e-5, 1e-5)
    graph = replace(graph, host_costs=thought)
    segments = recompute_all(graph)[::2]
    before = simulate(graph, segments)
    device = device_share * before.device_seconds
    host = host_share * device
    pace = Pace(max(device, host), host)
    found = corrected(graph, [segments], pace)
    after = simulate(found, segments)
    assert after.seconds == pytest.approx(pace.seconds)
    assert after.host_seconds <= max(host, before.host_seconds) * (1 + 1e-9)
    assert after.bytes_at == before.bytes_at
    if not pace.is_bound_by_host:
        assert after.device_seconds == pytest.approx(device)
        shorter = simulate(found, ()).device_seconds / graph.step_seconds
        assert shorter == pytest.approx(device_share)


def test_where_host_and_device_are_one_nothing_is_corrected():
    graph = transformer_graph(2)
    assert corrected(graph, [recompute_all(graph)], Pace(1.0, 1.0)) is graph


@pytest.mark.parametrize("plain", [0.5, 3.0])
@pytest.mark.parametrize("slower", [1.05, 1.24, 3.0])
def test_a_plan_and_the_plain_step_that_ran_in_turns_are_predicted_as_they_ran(
    plain, slower
):
    graph = transformer_graph(4)
    segments = recompute_all(graph)[::2]
    found = compared(graph, [segments], slower * plain, plain)
    assert simulate(found, ()).seconds == pytest.approx(plain)
    assert simulate(found, segments).seconds == pytest.approx(slower * plain)
    assert simulate(found, segments).bytes_at == simulate(graph, segments).bytes_at


def test_a_plan_that_ran_faster_than_the_plain_step_still_costs_something():
    graph = transformer_graph(4)
    found = compared(graph, [recompute_all(graph)], 0.9, 1.0)
    assert simulate(found, ()).seconds == pytest.approx(1.0)
    assert 1.0 < simulate(found, recompute_all(graph)).seconds < 1.1

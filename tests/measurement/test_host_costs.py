"""What issuing costs the host: a step less its plain part is recording and replays."""

import time
from dataclasses import astuple, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.graphs import transformer_graph
from recoup.core.footprint import total_footprint
from recoup.core.graph import HostCosts
from recoup.core.simulation import simulate
from recoup.measurement.steps.training_step import training_step
from recoup.measurement.timing.host_cost import (
    RECORDING_BY_LEAST,
    REPLAY_BY_FORWARD,
    STEP_BY_FORWARD,
    Calls,
    corrected,
    host_costs_of,
)
from recoup.measurement.timing.pace import Pace
from recoup.planners.baselines import recompute_all


class Slow(nn.Module):
    """Keeps the host for some time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seconds = 0.0
        self.seen: list[bool] = []

    def forward(self, x):
        self.seen.append(torch.is_grad_enabled())
        time.sleep(self.seconds)
        return self.layer(x)


def test_the_calls_of_the_last_step_are_called_again_without_gradients():
    model = Slow()
    step = training_step(model, torch.ones(1, 2), loss=torch.sum)
    calls = Calls(2)
    with calls.noted([model]):
        for _ in range(2):  # two steps of two calls
            model(torch.ones(1, 2))
            model(x=torch.ones(3, 2))
    model.seen.clear()
    model.seconds = 0.02
    assert 0.04 <= calls.again(step) < 0.1
    assert model.seen == [False] * 4  # twice, the faster one counts
    assert not model._forward_pre_hooks


class Differentiating(nn.Module):
    """Takes a gradient in its forward."""

    def forward(self, x):
        return torch.autograd.grad((x * x).sum(), x, create_graph=True)[0]


def test_a_model_that_needs_gradients_in_forward_is_taken_to_record_for_the_least():
    x = torch.ones(2, requires_grad=True)
    model = Differentiating()
    step = training_step(model, x, loss=torch.sum)
    calls = Calls(1)
    with calls.noted([model]):
        model(x)
    assert calls.again(step) == float("inf")
    assert torch.is_grad_enabled()
    graph = transformer_graph(2)
    found = host_costs_of(
        graph, Pace(3.0, 3.0), plain_forward_seconds=float("inf"), least_seconds=1e-3
    )
    assert found.recording_seconds == pytest.approx(1e-3)
    work = all_recomputed(graph)
    assert found.seconds(work.recorded, work.replayed) == pytest.approx(3.0)


def all_recomputed(graph):
    return total_footprint(graph, recompute_all(graph))


def test_what_is_neither_the_plain_step_nor_replays_is_recording():
    graph = transformer_graph(3)
    found = host_costs_of(graph, Pace(10.0, 10.0), plain_forward_seconds=1.0)
    work = all_recomputed(graph)
    assert found.plain_seconds == STEP_BY_FORWARD
    again = REPLAY_BY_FORWARD / len(graph.operations)
    assert found.replaying_seconds == pytest.approx(again)
    recording = 10.0 - STEP_BY_FORWARD - work.replayed * again
    assert work.recorded * found.recording_seconds == pytest.approx(recording)


@given(
    host=st.floats(0.01, 100),
    plain_forward=st.floats(0.001, 100) | st.just(float("inf")),
    least=st.floats(0, 0.1),
)
def test_all_of_the_time_of_a_host_that_is_waited_for_is_in_some_part(
    host, plain_forward, least
):
    graph = transformer_graph(2)
    work = all_recomputed(graph)
    waited_for, ahead = (
        host_costs_of(
            graph,
            Pace(seconds, host),
            plain_forward_seconds=plain_forward,
            least_seconds=least,
        )
        for seconds in (host, 2 * host)
    )
    assert waited_for.seconds(work.recorded, work.replayed) == pytest.approx(host)
    assert min(astuple(ahead)) >= 0
    assert ahead.plain_seconds == waited_for.plain_seconds
    assert ahead.replaying_seconds == waited_for.replaying_seconds
    assert ahead.recording_seconds <= waited_for.recording_seconds
    least_recording = min(work.recorded * least, host) * (1 - 1e-9)
    assert work.recorded * ahead.recording_seconds >= least_recording


def test_a_host_that_is_not_waited_for_records_in_no_more_than_the_usual_time():
    graph = transformer_graph(3)
    found = host_costs_of(
        graph, Pace(90.0, 30.0), plain_forward_seconds=0.1, least_seconds=1e-3
    )
    assert found.recording_seconds == pytest.approx(RECORDING_BY_LEAST * 1e-3)


@pytest.mark.parametrize("slower", [0.5, 1.5])
def test_a_host_that_is_waited_for_is_as_slow_as_it_was_seen_to_be(slower):
    graph = transformer_graph(3)
    thought = HostCosts(4.0, 0.5, 0.25)
    graph = replace(graph, host_costs=thought)
    segments = recompute_all(graph)[:1]
    host = slower * simulate(graph, segments).host_seconds
    found = corrected(graph, [segments], Pace(host, host)).host_costs
    assert found is not None
    assert astuple(found) == pytest.approx([slower * part for part in astuple(thought)])
    costs = simulate(replace(graph, host_costs=found), segments)
    assert costs.host_seconds == pytest.approx(host)


def test_a_host_that_is_not_waited_for_is_no_slower_than_it_was_seen_to_be():
    graph = replace(transformer_graph(3), host_costs=HostCosts(4.0, 0.5, 0.25))
    segments = recompute_all(graph)
    thought = simulate(graph, segments).host_seconds
    waiting = Pace(9 * thought, 2 * thought)
    assert corrected(graph, [segments], waiting).host_costs == graph.host_costs
    found = corrected(graph, [segments], Pace(9 * thought, thought / 2)).host_costs
    costs = simulate(replace(graph, host_costs=found), segments)
    assert costs.host_seconds == pytest.approx(thought / 2)


def test_where_there_is_no_host_beside_the_device_nothing_is_learned():
    graph = transformer_graph(2)
    assert graph.host_costs is None
    assert corrected(graph, [()], Pace(1.0, 1.0)).host_costs is None

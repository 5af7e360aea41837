"""What issuing costs the host: a step less its plain part is recording and replays."""

import time

import pytest
import torch
from torch import nn

from benchmarks.graphs import transformer_graph
from recoup.core.footprint import total_footprint
from recoup.measure.graphs import recompute_all
from recoup.measure.issuing import (
    FORWARD_BY_FORWARD,
    REPLAY_BY_RECORDING,
    STEP_BY_FORWARD,
    Calls,
    issuing_of,
)
from recoup.measure.pace import Pace
from recoup.measure.training import training_step


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


def test_calls_are_timed_by_the_step_and_called_again_without_gradients():
    model = Slow()
    step = training_step(model, torch.ones(1, 2), loss=torch.sum)
    calls = Calls(2)
    with calls.noted(model):
        for seconds in (0.05, 0.02):  # two steps of two calls
            model.seconds = seconds
            model(torch.ones(1, 2))
            model(x=torch.ones(3, 2))
    assert 0.04 <= calls.host_seconds < 0.1
    model.seen.clear()
    assert 0.04 <= calls.again(step) < 0.1
    assert model.seen == [False] * 4  # twice, the faster one counts
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


class Differentiating(nn.Module):
    """Takes a gradient in its forward."""

    def forward(self, x):
        return torch.autograd.grad((x * x).sum(), x, create_graph=True)[0]


def test_a_model_that_needs_gradients_in_forward_is_taken_to_record_for_nothing():
    x = torch.ones(2, requires_grad=True)
    model = Differentiating()
    step = training_step(model, x, loss=torch.sum)
    calls = Calls(1)
    with calls.noted(model):
        model(x)
    assert calls.again(step) == float("inf")
    assert torch.is_grad_enabled()
    issuing = issuing_of(
        transformer_graph(2),
        Pace(9.0, 3.0),
        forward_seconds=1.0,
        plain_forward_seconds=float("inf"),
    )
    assert issuing.plain_seconds == 3.0
    assert issuing.recording_seconds == issuing.replaying_seconds == 0.0


@pytest.mark.parametrize("forward", [0.5, 1.25, 2.0, 100.0])
def test_all_of_the_hosts_time_is_in_one_part_or_another(forward):
    graph = transformer_graph(3)
    pace = Pace(20.0, 10.0)
    found = issuing_of(graph, pace, forward_seconds=forward, plain_forward_seconds=1.0)
    total = total_footprint(graph, recompute_all(graph))
    replayed = sum(len(replay.operations) for replay in total.replays)
    recording = total.recorded * found.recording_seconds
    replaying = replayed * found.replaying_seconds
    assert found.plain_seconds == STEP_BY_FORWARD
    assert found.plain_seconds + recording + replaying == pytest.approx(10.0)
    expected = min(max(0.0, forward - FORWARD_BY_FORWARD), 10.0 - STEP_BY_FORWARD)
    assert recording == pytest.approx(expected)


@pytest.mark.parametrize("plain_forward", [1.0, 3.5, 4.0, float("inf")])
@pytest.mark.parametrize("forward", [0.5, 3.0, 9.0])
def test_recording_and_replays_are_not_free_whatever_forward_says(
    plain_forward, forward
):
    graph = transformer_graph(3)
    total = total_footprint(graph, recompute_all(graph))
    replayed = sum(len(replay.operations) for replay in total.replays)
    least = 1.0 / total.recorded  # a second for recording all of it
    found = issuing_of(
        graph,
        Pace(20.0, 10.0),
        forward_seconds=forward,
        plain_forward_seconds=plain_forward,
        least_seconds=least,
    )
    recording = total.recorded * found.recording_seconds
    replaying = replayed * found.replaying_seconds
    assert found.plain_seconds + recording + replaying == pytest.approx(10.0)
    assert recording >= 1.0 - 1e-9
    added = recording + replaying
    assert added >= 1.0 + REPLAY_BY_RECORDING * replayed * least - 1e-9
    if STEP_BY_FORWARD * plain_forward < 5:
        assert found.plain_seconds == STEP_BY_FORWARD * plain_forward


def test_a_host_that_is_faster_than_the_least_has_no_time_for_a_plain_step():
    graph = transformer_graph(2)
    found = issuing_of(
        graph,
        Pace(2.0, 1.0),
        forward_seconds=0.5,
        plain_forward_seconds=0.1,
        least_seconds=1.0,
    )
    assert found.plain_seconds == 0.0
    total = total_footprint(graph, recompute_all(graph))
    assert total.recorded * found.recording_seconds == pytest.approx(1.0)
    assert found.replaying_seconds == 0.0

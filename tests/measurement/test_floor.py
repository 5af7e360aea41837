"""The measured step: its graph says to the byte what a real step takes."""

import time
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.zoo.cases import CASES
from recoup.backend.memory.meters import StorageMeter, device_meter
from recoup.backend.operators.timers import OperatorTimer
from recoup.core.simulation import simulate
from recoup.engine.applied.applied_plan import Applied
from recoup.engine.applied.model_blocks import block_names
from recoup.engine.applied.planned_runs import Cuts
from recoup.measurement.steps import floor
from recoup.measurement.steps.floor import measure_floor, run_step
from recoup.measurement.steps.training_step import training_step
from recoup.measurement.tracing.observation import observe
from recoup.planners.baselines import recompute_all

NAMES = ["bert", "convnext", "densenet-121", "llama", "resnet-50", "u-net"]


def described(name):
    case = CASES[name]
    model, batch = case.build("tiny"), case.batch("tiny")
    return training_step(model, batch, loss=case.loss)


def smallest_bytes(step):
    """Run the step with all its blocks recomputed, and return its peak."""
    applied = Applied(step.model, Cuts(block_names(step.model)))
    try:
        return run_step(step).peak_bytes
    finally:
        applied.remove()


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_step_takes_what_the_graph_says_though_it_was_not_run(name):
    step = described(name)
    graph = measure_floor(step)
    assert simulate(graph, ()).peak_bytes == run_step(step).peak_bytes


@pytest.mark.parametrize("name", NAMES)
def test_a_replay_does_not_meet_what_the_operator_after_it_takes(name):
    step = described(name)
    graph = measure_floor(step)
    assert simulate(graph, recompute_all(graph)).peak_bytes == smallest_bytes(step)


@pytest.mark.parametrize("name", ["llama", "u-net"])
def test_storages_count_as_the_blocks_that_an_allocator_gives(name, monkeypatch):
    monkeypatch.setattr(floor, "device_meter", lambda _: StorageMeter(block_bytes=512))
    step = described(name)
    graph = measure_floor(step)
    assert simulate(graph, recompute_all(graph)).peak_bytes == smallest_bytes(step)
    assert simulate(graph, ()).peak_bytes == run_step(step).peak_bytes


class Interrupted(OperatorTimer):
    """A clock on which only something else takes time, once, in an operator."""

    def __init__(self, name: str) -> None:
        super().__init__("cpu")
        self._name = name
        self._met = 0
        self.now = 0.0

    def run(self, call):
        interrupted = str(call.func).startswith(self._name)
        self._met += interrupted

        def slowed(*args, **kwargs):
            if self._met == 2:
                self.now += 0.2
            return call(*args, **kwargs)

        return super().run(partial(slowed) if interrupted else call)


@pytest.mark.parametrize("name", ["aten.native_batch_norm", "aten.relu_"])
def test_an_interruption_of_an_operator_that_may_not_run_again_does_not_count(
    monkeypatch, name
):
    def block() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 8))

    model, batch = nn.Sequential(*(block() for _ in range(4))), torch.randn(4, 8)
    step = training_step(model, batch, loss=lambda output: output.sum())
    timer = Interrupted(name)
    monkeypatch.setattr(time, "perf_counter", lambda: timer.now)
    graph = observe(step, lambda: device_meter(step.device), lambda: timer).graph
    assert timer.now >= 0.2
    assert sum(op.name.startswith(name) for op in graph.operations) == 4
    assert graph.forward_seconds == 0

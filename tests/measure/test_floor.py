"""The measured step: its graph says to the byte what a real step takes."""

import pytest

from benchmarks.zoo.cases import CASES
from recoup.backend.memory import StorageMeter
from recoup.core.simulation import simulate
from recoup.engine.plans import Applied
from recoup.engine.runs import Cuts
from recoup.measure import floor
from recoup.measure.blocks import block_names
from recoup.measure.floor import measure_floor, run_step
from recoup.measure.graphs import recompute_all
from recoup.measure.training import training_step

NAMES = ["bert", "convnext", "densenet-121", "llama", "resnet-50", "u-net"]


def described(name):
    case = CASES[name]
    model, batch = case.build("tiny"), case.batch("tiny")
    return training_step(model, batch, loss=case.loss)


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_step_takes_what_the_graph_says_though_it_was_not_run(name):
    step = described(name)
    graph = measure_floor(step)
    assert simulate(graph, ()).peak_bytes == run_step(step).peak_bytes


@pytest.mark.parametrize("name", NAMES)
def test_a_replay_does_not_meet_what_the_operator_after_it_takes(name):
    step = described(name)
    graph = measure_floor(step)
    applied = Applied(step.model, Cuts(block_names(step.model)))
    try:
        measured = run_step(step).peak_bytes
    finally:
        applied.remove()
    assert simulate(graph, recompute_all(graph)).peak_bytes == measured


@pytest.mark.parametrize("name", ["llama", "u-net"])
def test_storages_count_as_the_blocks_that_an_allocator_gives(name, monkeypatch):
    monkeypatch.setattr(floor, "device_meter", lambda _: StorageMeter(block_bytes=512))
    step = described(name)
    graph = measure_floor(step)
    applied = Applied(step.model, Cuts(block_names(step.model)))
    try:
        measured = run_step(step).peak_bytes
    finally:
        applied.remove()
    assert simulate(graph, recompute_all(graph)).peak_bytes == measured
    assert simulate(graph, ()).peak_bytes == run_step(step).peak_bytes

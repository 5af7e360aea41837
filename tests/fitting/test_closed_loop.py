"""The driver of the closed loop: what it measures decides, and one plan is active."""

import itertools
import math
from dataclasses import astuple, replace

import pytest
import torch

from benchmarks.zoo.cases import CASES
from recoup.core.footprint import total_footprint
from recoup.core.graph import HostCosts
from recoup.core.plan import locate
from recoup.core.segments import Action
from recoup.core.simulation import simulate
from recoup.engine.applied.applied_plan import Applied
from recoup.fitting.closed_loop import ClosedLoop, Measurements
from recoup.measurement.steps.floor import measure_floor, run_step
from recoup.measurement.steps.training_step import training_step, untouched
from recoup.measurement.timing.pace import Pace

NAME = "gpt"
FASTER = 4
SECONDS = 1e-4
SHARE = 0.6


class Host:
    """Takes some time for a plain step, and more for every operator it records.

    It was several times as fast when the step was measured.
    """

    def __init__(self, recording_share: float) -> None:
        self.recording_share = recording_share
        self.paces: list[Pace] = []
        self.loop: ClosedLoop | None = None

    def pace_of(self, step, *, repeats, expected_seconds=None):
        """Return the pace that the active plan would have."""
        assert self.loop is not None
        attempts = [plan for plan in self.loop.search.known if self.is_on(plan[0])]
        segments = attempts[0][0]
        graph = self.loop.graph
        device = simulate(graph, segments).device_seconds
        total = total_footprint(graph, segments)
        host = self.host_costs(graph).seconds(total.recorded, total.replayed)
        self.paces.append(Pace(max(device, host), host))
        return self.paces[-1]

    def host_costs(self, graph):
        """Return what it really takes."""
        step_seconds = graph.step_seconds
        recording = self.recording_share * step_seconds / len(graph.operations)
        return HostCosts(0.5 * step_seconds, recording, 0.0)

    def measure_floor(self, *args, **kwargs):
        """Return a graph beside this host, as it is thought to be.

        With times that no other program on this machine has a part in.
        """
        graph = measure_floor(*args, **kwargs)
        graph = replace(
            graph,
            operations=tuple(replace(o, seconds=SECONDS) for o in graph.operations),
            step_seconds=3 * SECONDS * len(graph.operations),
        )
        thought = HostCosts(
            *(part / FASTER for part in astuple(self.host_costs(graph)))
        )
        return replace(graph, recording_seconds=0.0, host_costs=thought)

    def is_on(self, segments):
        """Return whether the active plan has as many regions, and where these are."""
        assert self.loop is not None
        active = self.loop._active
        if active is None or not segments:
            return False
        found = locate(self.loop.graph, active.plan)
        return [(s.start, s.stop) for s in found] == [
            (s.start, s.stop) for s in segments
        ]


def settle(host, *, paces=(), alone_seconds=math.inf, peak_share=1.0, elapsed=0.0):
    """Run the loop with measurements of a host; the clock stands still."""
    case = CASES[NAME]
    step = training_step(case.build("tiny"), case.batch("tiny"), loss=case.loss)
    known = iter(paces)

    def cost(*args, **kwargs):
        found = run_step(*args, **kwargs)
        peak_bytes = int(peak_share * found.peak_bytes)
        return replace(found, seconds=alone_seconds, peak_bytes=peak_bytes)

    def pace(*args, **kwargs):
        return next(known, None) or host.pace_of(*args, **kwargs)

    clock = itertools.chain([0.0], itertools.repeat(elapsed))
    measurements = Measurements(host.measure_floor, cost, pace, clock.__next__)
    with untouched(step) as repeated:
        loop = host.loop = ClosedLoop(
            repeated, frozenset({Action.KEEP}), "first", lambda _: None, measurements
        )
        loop.measure(None)
        budget_bytes = int(SHARE * simulate(loop.graph, ()).peak_bytes)
        return loop, loop.settle(budget_bytes), budget_bytes


def test_a_plan_is_kept_that_the_host_keeps_up_with():
    host = Host(recording_share=0.1)
    found, last, budget_bytes = settle(host)
    assert len(host.paces) == 1
    assert found.rounds == 1
    assert last.attempt.cost.peak_bytes <= budget_bytes
    assert last.solution.simulation.seconds == pytest.approx(last.pace.seconds)


def test_where_the_host_is_late_less_is_recorded_and_that_is_active():
    host = Host(recording_share=3.0)
    found, last, budget_bytes = settle(host)
    assert found.rounds == 2
    assert len(host.paces) == 4  # each plan was measured twice
    assert last.pace == host.paces[-1]
    assert host.paces[-1].seconds < host.paces[0].seconds
    assert last.attempt.cost.peak_bytes <= budget_bytes
    assert last.attempt.adapted is found._active
    assert simulate(found.graph, last.solution.segments) == last.solution.simulation
    assert last.solution.segments == last.attempt.solution.segments
    assert last.solution.simulation.seconds == pytest.approx(last.pace.seconds)


def test_of_two_plans_the_faster_one_is_active_again():
    host = Host(recording_share=3.0)
    paces = [Pace(0.1, 0.1)] * 2 + [Pace(0.2, 0.2)] * 2
    found, last, _ = settle(host, paces=paces, alone_seconds=1.0)
    assert found.rounds == 2
    assert last.pace == Pace(0.1, 0.1)
    assert last.attempt.adapted is found._active
    assert simulate(found.graph, last.solution.segments) == last.solution.simulation
    assert last.solution.simulation.seconds == pytest.approx(0.1)
    hooks = found._step.model._forward_pre_hooks.values()
    assert (
        sum(isinstance(getattr(hook, "__self__", None), Applied) for hook in hooks) == 1
    )
    assert torch.is_grad_enabled()


def test_a_plan_is_kept_where_another_one_would_take_too_long():
    host = Host(recording_share=3.0)
    found, last, _ = settle(host, paces=[Pace(1e3, 1e3)], alone_seconds=1e4)
    assert found.rounds == 1
    assert last.attempt.adapted is found._active


def test_a_disturbed_lap_is_measured_again_and_the_second_pace_counts():
    host = Host(recording_share=0.1)
    _, last, _ = settle(host, paces=[Pace(10 * SECONDS, 0.0)])
    assert last.pace == host.paces[-1]
    planned = last.attempt.solution.simulation.seconds
    assert last.solution.simulation.seconds == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize("elapsed", [0.0, 1e9])
def test_room_is_used_if_there_is_time(elapsed):
    host = Host(recording_share=0.1)
    found, last, budget_bytes = settle(
        host, alone_seconds=0.01, peak_share=0.9, elapsed=elapsed
    )
    has_time = not elapsed
    assert found.rounds == (2 if has_time else 1)
    assert ((last.attempt.target_bytes or 0) > budget_bytes) == has_time
    assert last.attempt.cost.peak_bytes <= budget_bytes


def test_a_plan_that_misses_the_budget_is_corrected_whatever_the_time():
    host = Host(recording_share=0.1)
    found, last, budget_bytes = settle(host, peak_share=1.1, elapsed=1e9)
    assert found.rounds > 1
    assert last.attempt.cost.peak_bytes <= budget_bytes

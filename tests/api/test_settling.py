"""Settling where the host is slower than predicted: measured times decide."""

import math
from dataclasses import astuple, replace

import pytest
import torch

from benchmarks.zoo.cases import CASES
from recoup.api import settling
from recoup.api.settling import Settling
from recoup.core.graph import Issuing
from recoup.core.segments import Action
from recoup.core.simulation import simulate
from recoup.engine.plans import Applied
from recoup.measure.floor import measure_floor, run_step
from recoup.measure.issuing import Work
from recoup.measure.pace import Pace
from recoup.measure.training import training_step, untouched

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
        self.settling: Settling | None = None

    def pace_of(self, step, *, repeats, expected_seconds=None):
        """Return the pace that the plan in force would have."""
        assert self.settling is not None
        attempts = [plan for plan in self.settling.search.known if self.is_on(plan[0])]
        segments = attempts[0][0]
        graph = self.settling.graph
        device = simulate(graph, segments).device_seconds
        host = self.issuing(graph).seconds(*Work.of(graph, segments))
        self.paces.append(Pace(max(device, host), host))
        return self.paces[-1]

    def issuing(self, graph):
        """Return what it really takes."""
        step_seconds = graph.step_seconds
        recording = self.recording_share * step_seconds / len(graph.operations)
        return Issuing(0.5 * step_seconds, recording, 0.0)

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
        thought = Issuing(*(part / FASTER for part in astuple(self.issuing(graph))))
        return replace(graph, recording_seconds=0.0, issuing=thought)

    def is_on(self, segments):
        """Return whether the plan in force has as many regions, and where these are."""
        assert self.settling is not None
        in_force = self.settling._in_force
        if in_force is None or not segments:
            return False
        places = self.settling.graph.boundaries
        wanted = [(places[s.start].label, places[s.stop].label) for s in segments]
        spans = in_force.plan.spans
        return wanted == [(span.start.label, span.stop.label) for span in spans]


@pytest.fixture
def settled(monkeypatch):
    def settle(host, alone_seconds=math.inf, *, peak_share=1.0, limit_seconds=60.0):
        case = CASES[NAME]
        model, batch = case.build("tiny"), case.batch("tiny")
        step = training_step(model, batch, loss=case.loss)

        def timed_run(*args, **kwargs):
            cost = run_step(*args, **kwargs)
            peak_bytes = int(peak_share * cost.peak_bytes)
            return replace(cost, seconds=alone_seconds, peak_bytes=peak_bytes)

        monkeypatch.setattr(settling, "measure_floor", host.measure_floor)
        monkeypatch.setattr(settling, "pace_of", host.pace_of)
        monkeypatch.setattr(settling, "run_step", timed_run)
        monkeypatch.setattr(settling, "_LIMIT_SECONDS", limit_seconds)
        with untouched(step) as repeated:
            found = Settling(
                repeated, frozenset({Action.KEEP}), "first", lambda _: None
            )
            host.settling = found
            found.measure(None)
            budget_bytes = int(SHARE * simulate(found.graph, ()).peak_bytes)
            return found, found.settle(budget_bytes), budget_bytes

    return settle


def test_a_plan_is_kept_that_the_host_keeps_up_with(settled):
    host = Host(recording_share=0.1)
    found, last, budget_bytes = settled(host)
    assert len(host.paces) == 1
    assert found.rounds == 1
    assert last.attempt.cost.peak_bytes <= budget_bytes
    assert last.solution.simulation.seconds == pytest.approx(last.pace.seconds)


def test_where_the_host_is_late_less_is_recorded_and_that_is_in_force(settled):
    host = Host(recording_share=3.0)
    found, last, budget_bytes = settled(host)
    assert found.rounds == 2
    assert len(host.paces) == 4  # each plan was looked at twice
    assert last.pace == host.paces[-1]
    assert host.paces[-1].seconds < host.paces[0].seconds
    assert last.attempt.cost.peak_bytes <= budget_bytes
    assert last.attempt.adapted is found._in_force
    assert simulate(found.graph, last.solution.segments) == last.solution.simulation
    assert last.solution.segments == last.attempt.solution.segments
    assert last.solution.simulation.seconds == pytest.approx(last.pace.seconds)


def test_of_two_plans_the_one_that_was_faster_is_put_back(settled, monkeypatch):
    host = Host(recording_share=3.0)
    paces = iter([Pace(0.1, 0.1)] * 2 + [Pace(0.2, 0.2)] * 2)
    monkeypatch.setattr(host, "pace_of", lambda *_, **__: next(paces))
    found, last, _ = settled(host, alone_seconds=1.0)
    assert found.rounds == 2
    assert last.pace == Pace(0.1, 0.1)
    assert last.attempt.adapted is found._in_force
    assert simulate(found.graph, last.solution.segments) == last.solution.simulation
    assert last.solution.simulation.seconds == pytest.approx(0.1)
    hooks = found._step.model._forward_pre_hooks.values()
    assert sum(isinstance(hook.__self__, Applied) for hook in hooks) == 1
    assert torch.is_grad_enabled()


def test_a_plan_is_kept_where_another_one_would_take_too_long(settled, monkeypatch):
    host = Host(recording_share=3.0)
    monkeypatch.setattr(host, "pace_of", lambda *_, **__: Pace(1e3, 1e3))
    found, last, _ = settled(host, alone_seconds=1e4)
    assert found.rounds == 1
    assert last.attempt.adapted is found._in_force


def test_a_lap_that_was_disturbed_is_measured_again(settled, monkeypatch):
    host = Host(recording_share=0.1)
    usual = host.pace_of
    asked: list[int] = []

    def disturbed(step, *, repeats, expected_seconds=None):
        asked.append(repeats)
        pace = usual(step, repeats=repeats)
        return replace(pace, seconds=3 * pace.seconds) if repeats == 1 else pace

    monkeypatch.setattr(host, "pace_of", disturbed)
    _, last, _ = settled(host)
    assert asked == [1, settling._LAPS]
    assert last.pace == host.paces[-1]
    planned = last.attempt.solution.simulation.seconds
    assert last.solution.simulation.seconds == pytest.approx(planned, rel=0.01)


def test_a_step_takes_no_longer_in_a_row_than_alone(settled, monkeypatch):
    host = Host(recording_share=0.1)
    monkeypatch.setattr(host, "pace_of", lambda *_, **__: Pace(1e3, 1e-6))
    _, last, _ = settled(host, alone_seconds=0.25)
    assert last.pace == Pace(0.25, 1e-6)
    assert last.solution.simulation.seconds == pytest.approx(0.25)


@pytest.mark.parametrize(("seconds", "laps"), [(0.1, 7), (0.2, 5), (0.6, 3)])
def test_a_host_that_varies_is_looked_at_by_more_laps_if_they_are_short(
    settled, monkeypatch, seconds, laps
):
    host = Host(recording_share=3.0)
    asked: list[tuple[int, float | None]] = []

    def varying(step, *, repeats, expected_seconds=None):
        asked.append((repeats, expected_seconds))
        return Pace(seconds, seconds)

    monkeypatch.setattr(host, "pace_of", varying)
    _, last, _ = settled(host, alone_seconds=seconds / 2)
    planned = last.attempt.solution.simulation.seconds
    assert asked[:2] == [(1, None), (laps, planned)]
    assert last.pace == Pace(seconds, seconds)  # one step alone says less than many


@pytest.mark.parametrize("limit_seconds", [1e9, -1e9])
def test_room_is_used_if_there_is_time(settled, limit_seconds):
    host = Host(recording_share=0.1)
    found, last, budget_bytes = settled(
        host, alone_seconds=0.01, peak_share=0.9, limit_seconds=limit_seconds
    )
    has_time = limit_seconds > 0
    assert found.rounds == (2 if has_time else 1)
    assert (last.attempt.target_bytes > budget_bytes) == has_time
    assert last.attempt.cost.peak_bytes <= budget_bytes


def test_a_plan_that_misses_the_budget_is_corrected_whatever_the_time(settled):
    host = Host(recording_share=0.1)
    found, last, budget_bytes = settled(host, peak_share=1.1, limit_seconds=-1e9)
    assert found.rounds > 1
    assert last.attempt.cost.peak_bytes <= budget_bytes

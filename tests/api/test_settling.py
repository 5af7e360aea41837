"""Settling where the host is slower than predicted: measured times decide."""

from dataclasses import replace

import pytest
import torch

from benchmarks.zoo.cases import CASES
from recoup.api import settling
from recoup.api.settling import Settling
from recoup.core.footprint import total_footprint
from recoup.core.graph import Issuing
from recoup.core.segments import Action
from recoup.core.simulation import simulate
from recoup.engine.plans import Applied
from recoup.measure.floor import measure_floor
from recoup.measure.pace import Pace
from recoup.measure.training import training_step, untouched

NAME = "gpt"
SHARE = 0.6


class Host:
    """Takes some time for a plain step, and more for every operator it records."""

    def __init__(self, recording_share: float) -> None:
        self.recording_share = recording_share
        self.paces: list[Pace] = []
        self.settling: Settling | None = None

    def pace_of(self, step, *, repeats):
        """Return the pace that the plan in force would have."""
        assert self.settling is not None
        attempts = [plan for plan in self.settling.search.known if self.is_on(plan[0])]
        segments = attempts[0][0]
        device = simulate(replace(self.settling.graph, issuing=None), segments).seconds
        recorded = total_footprint(self.settling.graph, segments).recorded
        count = len(self.settling.graph.operations)
        host = device * (0.5 + self.recording_share * recorded / count)
        self.paces.append(Pace(max(device, host), host))
        return self.paces[-1]

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
    def settle(host):
        case = CASES[NAME]
        model, batch = case.build("tiny"), case.batch("tiny")
        step = training_step(model, batch, loss=case.loss)
        monkeypatch.setattr(settling, "measure_floor", beside_a_free_host)
        monkeypatch.setattr(settling, "pace_of", host.pace_of)
        with untouched(step) as repeated:
            found = Settling(
                repeated, frozenset({Action.KEEP}), "first", lambda _: None
            )
            host.settling = found
            found.measure(None)
            budget_bytes = int(SHARE * simulate(found.graph, ()).peak_bytes)
            return found, found.settle(budget_bytes), budget_bytes

    return settle


def beside_a_free_host(*args, **kwargs):
    graph = measure_floor(*args, **kwargs)
    thousandth = graph.step_seconds / len(graph.operations) / 1000
    issuing = Issuing(0.1 * graph.step_seconds, thousandth, thousandth)
    return replace(graph, recording_seconds=0.0, issuing=issuing)


def recorded(found, attempt):
    return total_footprint(found.graph, attempt.solution.segments).recorded


def test_a_plan_is_kept_that_the_host_keeps_up_with(settled):
    host = Host(recording_share=0.1)
    found, last, budget_bytes = settled(host)
    assert len(host.paces) == 1
    assert found.rounds == 1
    assert last.attempt.cost.peak_bytes <= budget_bytes


def test_where_the_host_is_late_less_is_recorded_and_that_is_in_force(settled):
    host = Host(recording_share=3.0)
    found, last, budget_bytes = settled(host)
    assert len(host.paces) == 2
    assert last.pace == host.paces[1]
    assert host.paces[1].seconds < host.paces[0].seconds
    assert last.attempt.cost.peak_bytes <= budget_bytes
    assert last.attempt.adapted is found._in_force
    assert found.graph.issuing is not None
    assert simulate(found.graph, last.attempt.solution.segments) == (
        last.attempt.solution.simulation
    )


def test_of_two_plans_the_one_that_was_faster_is_put_back(settled, monkeypatch):
    host = Host(recording_share=3.0)
    paces = iter([Pace(0.1, 0.1), Pace(0.2, 0.2)])
    monkeypatch.setattr(host, "pace_of", lambda *_, **__: next(paces))
    found, last, _ = settled(host)
    assert found.rounds == 2
    assert last.pace == Pace(0.1, 0.1)
    assert last.attempt.adapted is found._in_force
    hooks = found._step.model._forward_pre_hooks.values()
    assert sum(isinstance(hook.__self__, Applied) for hook in hooks) == 1
    assert torch.is_grad_enabled()


def test_a_plan_is_kept_where_another_one_would_take_too_long(settled, monkeypatch):
    host = Host(recording_share=3.0)
    monkeypatch.setattr(host, "pace_of", lambda *_, **__: Pace(1e3, 1e3))
    found, last, _ = settled(host)
    assert found.rounds == 1
    assert last.attempt.adapted is found._in_force

"""An interrupt at any run of the step leaves the model as it was before."""

import inspect
import itertools

import pytest
import torch
from torch import nn

from recoup.engine.applied.applied_plan import Applied
from recoup.engine.recording.active import open_regions
from recoup.engine.recording.observers import observers
from recoup.fitting.benchmark import run_benchmark
from recoup.fitting.fit import fit
from recoup.fitting.measuring import measure
from tests.support.interrupted_fits import Fitting, fits_to_interrupt, interrupt_fits
from tests.support.interrupts import LineInterrupter, interruptions_of_lines
from tests.support.shards import Tally


class Counted(nn.Module):
    """Raises at a certain call of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32)) for _ in range(3))
        )
        self.narrow = nn.ModuleList(nn.Linear(32, 8) for _ in range(3))
        self.calls = itertools.count(1)
        self.fatal = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(self.narrow[number](layer(x)))
            if number == 1 and next(self.calls) == self.fatal:
                raise KeyboardInterrupt
        return nn.functional.dropout(x)


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + ("forward" in m.__dict__)
        for m in model.modules()
    )


ACTS = {
    "fit": lambda model, x: fit(model, x, 0.95, loss=torch.sum),
    "measure": lambda model, x: measure(model, x, loss=torch.sum),
    "dry": lambda model, x: measure(model, x, loss=torch.sum, dry=True),
    "contest": lambda model, x: run_benchmark(model, x, loss=torch.sum, budgets=[0.95]),
}
CALLS = {"fit": 7, "measure": 4, "dry": 2, "contest": 14}
"""How many calls are interrupted; a contest goes on in the same way after these."""


@pytest.mark.parametrize(
    ("act", "call"),
    [(name, call + 1) for name, calls in CALLS.items() for call in range(calls)],
)
def test_an_interrupt_leaves_nothing_behind(act, call):
    torch.manual_seed(0)
    model, x = Counted(), torch.randn(64, 8)
    model(x).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    model.calls, model.fatal = itertools.count(1), call
    with pytest.raises(KeyboardInterrupt):
        ACTS[act](model, x)
    assert hooks_of(model) == 0
    assert not open_regions()
    assert not observers()
    assert torch.equal(generator, torch.get_rng_state())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    model.fatal = 0
    model(x).sum().backward()


def test_a_fitted_model_that_was_interrupted_trains_on_with_the_plain_bits():
    torch.manual_seed(0)
    model, x = Counted(), torch.randn(64, 8)
    _, report = fit(model, x, 0.95, loss=torch.sum)
    model.calls, model.fatal = itertools.count(1), 1
    with pytest.raises(KeyboardInterrupt):
        model(x)
    found = []
    for fitted in (True, False):
        if not fitted:
            report.remove()
        model.zero_grad()
        torch.manual_seed(1)
        model(x).sum().backward()
        assert not open_regions()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_an_interrupt_after_the_last_run_takes_the_plan_off(monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(fit.__globals__, "_report", interrupted)
    model = Counted()
    with pytest.raises(KeyboardInterrupt):
        fit(model, torch.randn(64, 8), 0.8, loss=torch.sum)
    assert hooks_of(model) == 0


def test_an_interrupt_at_a_line_of_the_driver_leaves_the_model_as_it_was():
    fitting = Fitting(0.8)
    files = r"/(fitting/fit|steps/training_step|core/restoring)\.py$"
    tried = 0
    for where in interruptions_of_lines(fitting, files=files, every=41):
        assert fitting.faults() == [], where
        tried += 1
    assert tried > 2
    fitting()
    assert fitting.faults() == []


@pytest.mark.parametrize("budget", [0.8, 0.05])
def test_an_interrupt_while_a_plan_is_removed_leaves_nothing_of_it(budget):
    """Also while `fit` removes the last one: where no plan fits, and at its end."""
    lines, first = inspect.getsourcelines(Applied.remove)
    place = inspect.getfile(Applied), first + lines.index(REMOVAL)
    fitting, tried = Fitting(budget), LineInterrupter(place, time=0)
    tried.run(fitting)
    fitting.remove()
    count = tried.lines[place]
    assert count > 20
    for time in range(count, 0, -7):
        LineInterrupter(place, time=time).run(fitting)
        assert fitting.faults() == [], time


REMOVAL = "            handle.remove()\n"


def test_a_fit_that_leaves_something_behind_is_reported(monkeypatch):
    cases = fits_to_interrupt(r"fitting/arguments\.py$")
    assert {case.budget for case in cases} == {"met", "infeasible"}
    assert {case.time > 1 for case in cases} == {True, False}
    tally = Tally()
    interrupt_fits(iter(cases[:3]), tally)
    assert not tally.failures
    assert tally.kinds == {"whole": 3}

    def leaving(self: Fitting) -> None:
        whole(self)
        self.model.calls += 1

    whole = Fitting.__call__
    monkeypatch.setattr(Fitting, "__call__", leaving)
    tally = Tally()
    interrupt_fits(iter(cases[:3]), tally)
    assert tally.kinds == {"wrong": 1}
    assert "counted" in tally.failures[cases[0]]

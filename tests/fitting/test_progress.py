"""Progress: what is being done, how far it is, and about how long it will take."""

import io
import re

import pytest
import torch
from torch import nn

from recoup.fitting import fit as fitting
from recoup.fitting import progress as shown
from recoup.fitting.fit import fit
from recoup.fitting.measuring import measure
from recoup.fitting.progress import Course, progress_for
from recoup.planners.planner import frontier


def model_of(layers: int = 6) -> nn.Module:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))

    torch.manual_seed(0)
    return nn.Sequential(*(layer() for _ in range(layers)))


def test_fit_tells_what_it_does_and_how_long_it_will_take():
    said: list[str] = []
    model, x = model_of(), torch.ones(256, 16)
    _, report = fit(model, x, 0.7, loss=torch.sum, progress=said.append)
    report.remove()
    assert said[0] == "measuring a step at the least memory"
    assert said[1].startswith("planning for ")
    assert said[2].startswith("checking the plan on a real step")
    for words in said[1:]:
        assert re.search(r", about [0-9.]+ (us|ms|s) left$", words)


def test_fit_runs_the_step_as_often_as_it_says(monkeypatch):
    runs: list[tuple[int, int]] = []

    def course(count: int, show: object = None) -> Course:
        del show
        return Course(count, lambda _, done, total: runs.append((done, total)))

    monkeypatch.setattr(shown, "Course", course)
    model, x = model_of(), torch.ones(256, 16)
    _, report = fit(model, x, 0.999, loss=torch.sum, progress=False)
    report.remove()
    assert report.rounds == 1
    assert runs[0] == (0, fitting._RUNS)
    assert [done for done, _ in runs][-1] == fitting._RUNS


def test_time_left_shrinks_with_the_runs(monkeypatch):
    now = iter([0.0, 10.0, 20.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    course = Course(4)
    run = course.counting(lambda: "loss")
    assert course.seconds_left is None
    assert run() == "loss"
    assert course.seconds_left == 30.0
    run()
    assert course.seconds_left == 20.0


def test_more_runs_than_expected_are_never_less_than_one_left():
    told: list[tuple[str, int, int]] = []
    course = Course(1, lambda *news: told.append(news))
    run = course.counting(lambda: None)
    course("checking")
    for _ in range(3):
        run()
    assert told == [("checking", 0, 1), *(("checking", n, n + 1) for n in (1, 2, 3))]


@pytest.mark.parametrize(("wanted", "is_terminal"), [(True, False), (None, True)])
def test_a_terminal_sees_a_bar_that_is_gone_at_the_end(
    monkeypatch, wanted, is_terminal
):
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_for(wanted, runs=2) as course:
        course("planning")
        course.counting(lambda: None)()
    assert "planning" in stream.getvalue()
    # The cursor that the bar hid is shown again.
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


@pytest.mark.parametrize("wanted", [False, None])
def test_nobody_else_sees_anything(monkeypatch, wanted):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with progress_for(wanted, runs=2) as course:
        course("planning")
    assert stream.getvalue() == ""


def test_frontier_tells_of_every_budget():
    graph = measure(model_of(3), torch.ones(64, 16), loss=torch.sum)
    told: list[tuple[int, int]] = []
    frontier(graph, points=4, progress=lambda *news: told.append(news))
    total = told[0][1]
    assert told == [(done, total) for done in range(total)]

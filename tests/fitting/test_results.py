"""What calls return is read at a glance; an error says what to do in one's units."""

import pickle
import re
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import recoup
from recoup.core.simulation import simulate
from recoup.errors import InfeasibleError, UsageError
from recoup.report.composition import compose
from recoup.report.findings import PlanView, Step
from recoup.report.timeline import Timeline, timeline
from tests.support.findings import small_findings, small_graph, small_solutions


def model_of(layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
            for _ in range(layers)
        )
    )


BATCH = torch.ones(256, 16)


def results():
    found = small_findings()
    solution = small_solutions()[0]
    yield small_graph()
    yield solution
    yield solution.simulation
    yield found
    yield found.plan
    yield found.step
    yield timeline(found.step, found.plan)
    _, fitted = recoup.fit(model_of(), BATCH, 0.8, loss=torch.sum)
    yield fitted
    yield fitted.plan
    fitted.remove()


def test_the_repr_of_every_result_is_one_short_block():
    for result in results():
        text = repr(result)
        name = type(result).__name__
        assert text.startswith(name)
        assert "object at" not in text
        assert len(text.splitlines()) <= 5
        assert len(text) < 1000, name
        if name not in ("PlanView", "Timeline"):
            assert "iB" in text or name == "Step"


def test_every_result_is_shown_in_a_notebook_too():
    for result in results():
        if isinstance(result, PlanView | Step | Timeline):
            continue  # parts of findings
        html = result._repr_html_()
        ElementTree.fromstring(f"<div>{html}</div>")
        is_plan = isinstance(result, recoup.Plan)
        assert ("<svg" in html) != is_plan, type(result).__name__


def test_the_curve_of_a_notebook_is_the_memory_of_the_plan():
    solution = small_solutions()[0]
    (drawn,) = re.findall(r'<path d="M0 96(.*?)V96Z"', solution._repr_html_())
    heights = [float(y) for y in re.findall(r"V([0-9.]+)H", drawn)]
    peak_bytes = solution.simulation.peak_bytes
    found = [round((1 - y / 96) * peak_bytes) for y in heights]
    slack = peak_bytes * 0.06 / 96  # a coordinate has one place after the point
    for one, other in zip(found, solution.simulation.bytes_at, strict=True):
        assert abs(one - other) <= slack + 1


def test_compiled_results_are_short_too():
    _, fitted = recoup.fit(model_of(), BATCH, 1.0, loss=torch.sum, compile="exact")
    assert repr(fitted).startswith("CompiledFit of Sequential: peak ")
    assert "bitwise" in repr(fitted)
    assert len(repr(fitted)) < 500
    assert repr(fitted.plan).startswith("CompiledPlan(4 blocks, exact: budget ")
    assert "<svg" in fitted._repr_html_()
    fitted.remove()


def test_a_graph_knows_its_plain_peak_and_a_plan_takes_a_share_of_it():
    graph = small_graph()
    assert graph.peak_bytes == simulate(graph, ()).peak_bytes
    assert recoup.plan(graph, 0.8).peak_bytes <= 0.8 * graph.peak_bytes


def floor_share(message: str) -> float:
    (share,) = re.findall(r"Give it ([0-9.]+)% \(", message)
    return float(share) / 100


def test_a_share_that_cannot_be_met_is_answered_with_one_that_can():
    graph = small_graph()
    with pytest.raises(InfeasibleError, match="a budget of 1% of the plain") as caught:
        recoup.plan(graph, "1%")
    share = floor_share(str(caught.value))
    assert recoup.plan(graph, share).peak_bytes <= share * graph.peak_bytes
    with pytest.raises(InfeasibleError):
        recoup.plan(graph, share - 0.002)
    # Modules and operators as the user knows them, no places of a plan.
    assert re.search(r" (in|at) .*(addmm|tanh|sum) in (\d|the step)", str(caught.value))
    assert "#0" not in str(caught.value)


def test_a_budget_below_what_no_plan_changes_is_not_answered_with_smaller_blocks():
    with pytest.raises(InfeasibleError, match="fewer trainable parameters"):
        recoup.plan(small_graph(), "1KiB")


def test_an_error_of_fit_writes_a_page_on_request(tmp_path):
    with pytest.raises(InfeasibleError) as caught:
        recoup.fit(model_of(), BATCH, 0.1, loss=torch.sum)
    path = caught.value.write_page(tmp_path / "why.html")
    assert "Does not fit: the smallest peak known is" in path.read_text()
    share = floor_share(str(caught.value))
    _, fitted = recoup.fit(model_of(), BATCH, share, loss=torch.sum)
    assert fitted.measured_peak_bytes <= fitted.budget_bytes
    fitted.remove()
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.floor_bytes, str(again)) == (
        caught.value.floor_bytes,
        str(caught.value),
    )
    with pytest.raises(UsageError, match=r"call recoup\.fit"):
        again.write_page(tmp_path / "again.html")


def test_the_report_of_a_step_of_two_passes_shows_the_plan_of_both():
    first, second = model_of(4), model_of(3)

    def step():
        first(BATCH).sum().backward()
        second(BATCH).square().sum().backward()

    _, fitted = recoup.fit([first, second], None, 0.7, step=step)
    found = fitted.findings(points=0)
    assert len(found.step.phases) == 4
    assert found.plan.peak_bytes == fitted.predicted_peak_bytes
    assert found.plan.name != "plain"
    assert found.plan.reruns
    assert "<svg" in fitted._repr_html_()
    fitted.remove()


def test_findings_without_a_step_are_short():
    assert repr(compose(small_graph())).startswith("Findings(a training step, ")

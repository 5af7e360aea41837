"""fit where a step calls the model several times: accumulation, pairs, adversaries."""

import itertools

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.backend.memory.meters import StorageMeter
from recoup.core.plan import Plan
from recoup.core.simulation import simulate
from recoup.planners.baselines import recompute_all
from tests.support.bits import tree_differences
from tests.support.fitting import gradients_after, state_of
from tests.support.odd_models import Perceptron, mean_square, odd_batch
from tests.support.twin import leftovers


class Stack(nn.Module):
    def __init__(self, count: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Perceptron() for _ in range(count)))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.blocks(x))


def pair(model: nn.Module, x: Tensor):
    """Two forwards, then one backward."""

    def step() -> None:
        first, second = model(x), model(x.flip(0))
        (mean_square(first) + (first - second).abs().mean()).backward()

    return step


def unequal(model: nn.Module, x: Tensor):
    """Two forwards of other sizes, with computing between them."""

    def step() -> None:
        first = model(x).tanh()
        second = model(x[: len(x) // 2] * 2)
        (mean_square(first) + mean_square(second)).backward()

    return step


def accumulating(model: nn.Module, x: Tensor):
    """Forward and backward, three times."""

    def step() -> None:
        for part in range(3):
            (mean_square(model(x + part)) / 3).backward()

    return step


def teaching(model: nn.Module, x: Tensor):
    """A forward without gradients, whose outcome is the target of another."""

    def step() -> None:
        with torch.no_grad():
            target = model(x)
        mean_square(model(x * 0.5) - target).backward()

    return step


def twice_each(model: nn.Module, x: Tensor):
    """Two forwards and a backward, twice."""

    def step() -> None:
        for part in range(2):
            mean_square(model(x + part) - model(x - part)).backward()

    return step


STEPS = [pair, unequal, accumulating, teaching, twice_each]


def peak_bytes_of(model: nn.Module, step) -> int:
    model.zero_grad(set_to_none=True)
    with StorageMeter() as meter:
        meter.track(model)
        step()
        peak_bytes = meter.peak_bytes
    model.zero_grad(set_to_none=True)
    return peak_bytes


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("share", [0.8, 0.65])
def test_gradients_are_those_of_the_twin_within_the_budget(kind, share):
    model, x = Stack(), odd_batch()
    step = kind(model, x)
    before = state_of(model)
    expected = [gradients_after(model, step) for _ in range(2)]
    plain_bytes = peak_bytes_of(model, step)
    budget_bytes = int(share * plain_bytes)
    _, report = recoup.fit(model, step=step, budget=budget_bytes)
    found = [gradients_after(model, step) for _ in range(2)]
    measured_bytes = peak_bytes_of(model, step)
    report.remove()
    assert list(tree_differences(expected, found, where="")) == []
    assert list(tree_differences(before, state_of(model), where="")) == []
    assert list(leftovers()) == []
    assert measured_bytes <= budget_bytes < plain_bytes


def test_a_pair_of_calls_is_predicted_to_the_byte():
    model, x = Stack(), odd_batch()
    step = pair(model, x)
    graph = recoup.measure(model, step=step)
    assert graph.model_calls == 2
    budget_bytes = simulate(graph, ()).peak_bytes // 2
    # Regions in one of the calls alone do not do: the plan must have some in both.
    segments = recompute_all(graph)
    first = [s for s in segments if graph.is_within_run(segments[0].start, s.stop)]
    assert 0 < len(first) < len(segments)
    assert simulate(graph, first).peak_bytes > budget_bytes
    _, report = recoup.fit(model, step=step, budget=budget_bytes)
    assert report.rounds == 1
    assert report.predicted_peak_bytes == report.measured_peak_bytes
    spans = report.plan.spans
    assert {span.start.call for span in spans if span.start.module} >= {0, 1}
    assert Plan.from_json(report.plan.to_json()) == report.plan
    report.remove()


def test_a_step_that_broke_off_does_not_shift_those_after_it():
    model, x = Stack(), odd_batch()
    step = pair(model, x)
    _, report = recoup.fit(model, step=step, budget=0.7)
    measured_bytes = peak_bytes_of(model, step)
    model(x)  # one call of two, and no backward
    assert peak_bytes_of(model, step) == measured_bytes
    mean_square(model(x)).backward()
    assert peak_bytes_of(model, step) == measured_bytes
    report.remove()


def test_no_segment_of_a_plan_goes_from_one_call_into_the_next():
    model, x = Stack(), odd_batch()
    graph = recoup.measure(model, step=unequal(model, x))
    plain_bytes = simulate(graph, ()).peak_bytes
    for share in (0.9, 0.7, 0.55):
        for segment in recoup.plan(graph, int(share * plain_bytes)).segments:
            assert graph.is_within_run(segment.start, segment.stop)
    calls = [boundary.model_call for boundary in graph.boundaries]
    assert calls == sorted(calls)
    assert len(list(itertools.groupby(calls))) == 2


def test_a_step_that_calls_only_a_part_of_the_model_is_fitted_there():
    model, x = Stack(), odd_batch()

    def step() -> None:
        mean_square(model.blocks(x)).backward()

    before = state_of(model)
    expected = gradients_after(model, step)
    budget_bytes = int(0.7 * peak_bytes_of(model, step))
    _, report = recoup.fit(model, step=step, budget=budget_bytes)
    found = gradients_after(model, step)
    measured_bytes = peak_bytes_of(model, step)
    report.remove()
    assert list(tree_differences(expected, found, where="")) == []
    assert list(tree_differences(before, state_of(model), where="")) == []
    assert list(leftovers()) == []
    assert measured_bytes <= budget_bytes


def test_a_step_that_does_not_call_the_model_is_refused():
    model, other, x = Stack(), Stack(), odd_batch()
    before = state_of(model)
    with pytest.raises(
        recoup.errors.UsageError,
        match="step that calls this Stack with gradients, got none",
    ):
        recoup.fit(model, step=lambda: mean_square(other(x)).backward(), budget=0.7)
    assert list(tree_differences(before, state_of(model), where="")) == []
    assert list(leftovers()) == []


def test_adversaries_are_fitted_one_after_the_other():
    maker, judge, x = Stack(3), Stack(4), odd_batch()

    def step() -> None:
        made = maker(x)
        (mean_square(judge(x)) - mean_square(judge(made.detach()))).backward()
        for parameter in judge.parameters():
            parameter.requires_grad_(False)
        mean_square(judge(made)).backward()
        for parameter in judge.parameters():
            parameter.requires_grad_(True)

    def gradients():
        maker.zero_grad(set_to_none=True)
        judged = gradients_after(judge, step)
        made = [parameter.grad for parameter in maker.parameters()]
        maker.zero_grad(set_to_none=True)
        return judged, made

    expected = gradients()
    plain_bytes = peak_bytes_of(judge, step)
    _, judged = recoup.fit(judge, step=step, budget=0.8)
    maker.zero_grad(set_to_none=True)
    _, made = recoup.fit(maker, step=step, budget=0.95)
    found = gradients()
    assert peak_bytes_of(judge, step) < plain_bytes
    made.remove()
    judged.remove()
    assert list(tree_differences(expected, found, where="")) == []
    assert list(leftovers()) == []

"""Steps that run out of memory: planned tighter and run again, or explained."""

# A gradient is maybe None to pyright.
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false

import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import recoup
from tests.support.bits import tree_differences
from tests.support.fitting import state_of
from tests.support.odd_models import Perceptron, mean_square, odd_batch
from tests.support.twin import leftovers


def blocks(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Perceptron() for _ in range(count)))


class Failing(nn.Module):
    """Runs out of memory after its blocks, as often as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = blocks(), nn.BatchNorm1d(1)
        self.failures = 0

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.blocks(x), 0.2)
        x = x + self.norm(x.flatten()[:, None]).reshape(x.shape)
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError
        return x


def fitted(
    budget: float | str = 0.8, *, accumulate: bool = False
) -> tuple[Failing, recoup.results.Fit, Tensor]:
    model, batch = Failing(), odd_batch()
    _, report = recoup.fit(
        model, batch, budget, loss=mean_square, accumulate=accumulate
    )
    return model, report, batch


def test_a_step_out_of_memory_is_planned_tighter_and_gives_what_it_would_have_given():
    def trained(failures: int) -> tuple[object, recoup.results.Fit]:
        model, report, batch = fitted(accumulate=True)
        torch.manual_seed(1)
        mean_square(model(batch)).backward()  # to be added to
        model.failures = failures
        report.run(lambda: mean_square(model(batch)).backward())
        return {**state_of(model), "hooks": None, "random": torch.rand(1)}, report

    (expected, calm), (found, tight) = trained(0), trained(1)
    assert (calm.retries, tight.retries) == (0, 1)
    assert tight.plan.peak_bytes < calm.plan.peak_bytes
    assert list(tree_differences(expected, found, where="")) == []


def test_a_step_that_fails_again_raises():
    model, report, batch = fitted()
    model.failures = 2
    with pytest.raises(torch.OutOfMemoryError) as caught:
        report.run(lambda: model(batch))
    assert "run the step again" in caught.value.__notes__[0]
    assert report.retries == 1
    assert list(leftovers()) == []


def test_a_step_that_added_to_gradients_before_it_failed_is_not_run_again():
    model, report, batch = fitted(accumulate=True)
    runs = 0

    def step() -> None:
        nonlocal runs
        runs += 1
        mean_square(model(batch)).backward()
        raise torch.OutOfMemoryError

    mean_square(model(batch)).backward()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        report.run(step)
    assert runs == 1
    assert "added to gradients" in caught.value.__notes__[0]


def test_gradients_that_a_step_drops_are_not_held_for_it():
    model, report, batch = fitted()
    mean_square(model(batch)).backward()
    gradients = [weakref.ref(p.grad) for p in model.parameters()]

    def step() -> set[Tensor | None]:
        model.zero_grad(set_to_none=True)
        return {gradient() for gradient in gradients}

    assert report.run(step) == {None}


def test_other_errors_are_raised_at_once():
    _, report, _ = fitted()

    def step() -> None:
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 (any)
        report.run(step)
    assert report.retries == 0


class Head(nn.Module):
    """What a step has beside the model: parameters and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm = nn.BatchNorm1d(1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten()[:, None]).sin() * self.scale


def failing_in_backward(model: nn.Module, failures: int) -> Callable[[], None]:
    """Make backward run out of memory at the model's first parameter, so often."""
    left = [None] * failures

    def fail(gradient: Tensor) -> None:
        del gradient
        if left:
            left.pop()
            raise torch.OutOfMemoryError

    return next(model.parameters()).register_hook(fail).remove


def test_what_a_step_has_beside_the_model_is_put_back_too():
    def trained(failures: int) -> object:
        model, report, batch = fitted()
        head, factor = Head(), torch.ones(1, requires_grad=True)
        np.random.seed(3)  # noqa: NPY002 (the generator that steps draw from)
        release = failing_in_backward(model, failures)

        def step() -> None:
            drawn = np.random.rand()  # noqa: NPY002
            mean_square(head(model(batch)) * factor * drawn).backward()

        report.run(step)
        release()
        assert report.retries == failures
        gradients = [p.grad for p in (*head.parameters(), factor)]
        return {**state_of(model), "hooks": None}, state_of(head), gradients

    assert list(tree_differences(trained(0), trained(1), where="")) == []


@pytest.mark.parametrize("in_place", [True, False])
def test_gradients_that_a_sum_has_replaced_are_not_taken_for_dropped(in_place):
    """With a graph of its own the sum is a new tensor, and the old one is gone."""
    # That graph keeps more than the measured step does: there is room for it.
    model, report, batch = fitted("1GiB")
    mean_square(model(batch)).backward()
    release = failing_in_backward(model, 1)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        report.run(
            lambda: mean_square(model(batch)).backward(create_graph=not in_place)
        )
    release()
    assert "added to gradients" in caught.value.__notes__[0]


def test_a_plan_far_below_its_budget_is_tightened_all_the_same():
    model, report, batch = fitted("1GiB")
    assert report.plan.spans == ()
    before = report.predicted_peak_bytes
    model.failures = 1
    report.run(lambda: mean_square(model(batch)).backward())
    assert report.plan.spans
    assert report.predicted_peak_bytes <= 0.9 * before
    assert report.predicted_peak_bytes <= report.budget_bytes < before


def test_the_report_is_that_of_the_plan_in_force():
    model, report, batch = fitted()
    assert "measured peak" in str(report)
    model.failures = 1
    report.run(lambda: mean_square(model(batch)).backward())
    assert (report.retries, report.tightenings) == (1, 1)
    assert report.predicted_peak_bytes == report.plan.peak_bytes
    assert report.predicted_seconds == report.plan.seconds
    assert "measured" not in str(report)
    assert "planned 1 times for less" in str(report)


def test_where_nothing_is_tighter_the_error_says_so():
    model, report, batch = fitted()
    while report.tighten():
        pass
    model.failures = 1
    with pytest.raises(torch.OutOfMemoryError) as caught:
        report.run(lambda: model(batch))
    assert "no plan that takes a tenth less" in caught.value.__notes__[0]


def test_plans_for_other_sizes_are_few_and_fit_what_they_are_for():
    model, report, batch = fitted()
    assert report._adapted is not None
    (adapted,) = report._adapted.parts
    sizes = range(1, 4 * len(batch), 3)
    many = torch.cat([batch] * 4)

    def call_all() -> None:
        for size in sizes:
            model(many[:size])

    with pytest.warns(recoup.errors.BudgetWarning, match="axis 0: 64 -> "):
        call_all()
    assert len(sizes) > adapted.planned_groups
    assert adapted.planned_groups <= 8 + 2 * 8

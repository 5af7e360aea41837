"""Optimizers that `fit` does not know: their state is within the budget, or said."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import recoup
from recoup.errors import BudgetWarning
from recoup.fitting.fit_result import FitResult
from recoup.fitting.following.optimizer_memory import _WATCHES

WIDTH, ROWS = 64, 512
X = torch.ones(ROWS, WIDTH)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
            )
            for _ in range(4)
        )
    )


def moments_bytes(parameters: Iterator[nn.Parameter]) -> int:
    """Two moments of each parameter, and its step count."""
    return sum(2 * p.nbytes + 4 for p in parameters)


def train(model: nn.Module, *optimizers: Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        model(X).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def fitted(model: nn.Module, budget: float = 0.6, **options: Any) -> FitResult:
    _, report = recoup.fit(
        model, X, budget, loss=lambda y: y.square().mean(), **options
    )
    return report


def only_warning(said: pytest.WarningsRecorder) -> BudgetWarning:
    (warning,) = said
    assert warning.filename == __file__
    assert isinstance(warning.message, BudgetWarning)
    return warning.message


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """No warning but those that a test expects."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("compile_by", [False, "exact"])
def test_state_of_an_unknown_optimizer_is_said_once_to_the_byte(compile_by):
    model = net()
    report = fitted(model, compile=compile_by)
    optimizer = AdamW(model.parameters())
    with pytest.warns(BudgetWarning, match="got a step of AdamW, whose state") as said:
        train(model, optimizer)
    expected = report.measured_peak_bytes + moments_bytes(model.parameters())
    assert only_warning(said).needed_bytes == expected
    assert only_warning(said).budget_bytes == report.budget_bytes


def test_with_the_optimizer_its_state_is_in_the_budget():
    model = net()
    optimizer = AdamW(model.parameters())
    report = fitted(model, optimizer=optimizer)
    assert report.reserved_bytes == moments_bytes(model.parameters())
    train(model, optimizer)


@pytest.mark.parametrize("make", [Adam, SGD])
def test_state_that_fits_is_not_said(make: Callable[..., Optimizer]):
    model = net()
    budget = 1.0 if make is SGD else 64 << 20
    fitted(model, budget)
    train(model, make(model.parameters(), lr=0.1))


def test_the_states_of_several_optimizers_add_up():
    model = net()
    half_bytes = moments_bytes(model[:2].parameters())
    plain_bytes = fitted(net(), 1.0).plain_peak_bytes
    report = fitted(model, plain_bytes + half_bytes)
    first, second = Adam(model[:2].parameters()), Adam(model[2:].parameters())
    train(model, first)
    with pytest.warns(BudgetWarning) as said:
        train(model, first, second)
    needed_bytes = report.measured_peak_bytes + 2 * half_bytes
    assert only_warning(said).needed_bytes == needed_bytes


def test_without_its_plan_a_model_gives_no_warning():
    model = net()
    report = fitted(model)
    report.remove()
    train(model, Adam(model.parameters()))


def test_optimizers_of_other_models_do_not_count():
    model, other = net(), net()
    fitted(model)
    train(other, Adam(other.parameters()))


def test_a_model_is_not_kept_alive():
    model = net()
    report = fitted(model)
    assert model in _WATCHES
    del model, report
    assert not [watched for watched in _WATCHES if isinstance(watched, nn.Sequential)]


def test_a_second_fit_takes_the_place_of_the_first():
    model = net()
    fitted(model).remove()
    report = fitted(model, 64 << 20)
    train(model, Adam(model.parameters()))
    report.remove()


def test_state_that_was_there_counts_on_the_cpu_as_it_is_not_in_the_peak():
    model = net()
    optimizer = Adam(model.parameters())
    train(model, optimizer, steps=1)
    fitted(model)
    with pytest.warns(BudgetWarning, match="optimizer="):
        train(model, optimizer)


def test_a_step_that_trains_nothing_of_the_model_is_free():
    weight = nn.Parameter(torch.ones(3))
    model = net()
    fitted(model)
    weight.grad = torch.ones(3)
    Adam([weight]).step()


def test_half_precision_state_counts_with_its_own_size():
    model = net().bfloat16()
    x = X.bfloat16()
    _, report = recoup.fit(model, x, 0.6, loss=Tensor.sum)
    optimizer = Adam(model.parameters())
    model(x).sum().backward()
    with pytest.warns(BudgetWarning) as said:
        optimizer.step()
    expected = report.measured_peak_bytes + moments_bytes(model.parameters())
    assert only_warning(said).needed_bytes == expected

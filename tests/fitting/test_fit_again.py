"""fit beside what is there already: other plans, regions, optimizers, gradients."""

# A gradient is maybe None to pyright.
# pyright: reportOptionalMemberAccess=false

import copy
import pickle
from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup import CheckpointScope, Plan
from recoup.backend.memory.meters import StorageMeter
from recoup.errors import UsageError
from tests.support.bits import tree_differences
from tests.support.fitting import gradients_after, state_of
from tests.support.odd_models import Perceptron, mean_square, odd_batch


class Scoped(nn.Module):
    """Blocks of which some have a scope of the user's own."""

    def __init__(self, scoped: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Perceptron() for _ in range(8))
        self.scoped = scoped

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            with CheckpointScope("mine", number in self.scoped):
                x = block(x)
        return x


def blocks(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Perceptron() for _ in range(count)))


def peak_bytes_of(model: nn.Module, batch: Tensor) -> int:
    model.zero_grad(set_to_none=True)
    with StorageMeter() as meter:
        meter.track(model, batch)
        mean_square(model(batch)).backward()
        peak_bytes = meter.peak_bytes
    model.zero_grad(set_to_none=True)
    return peak_bytes


@pytest.mark.parametrize("share", [0.9, 0.8, 0.7])
@pytest.mark.parametrize("scoped", [(0, 1, 2), (2, 5)])
def test_of_several_plans_that_were_tried_the_one_in_force_was_measured(scoped, share):
    """Regions of the user's make predictions wrong, so that a plan is corrected."""
    model, batch = Scoped(scoped), odd_batch()
    _, report = recoup.fit(model, batch, share, loss=mean_square)
    measured_bytes = peak_bytes_of(model, batch)
    report.remove()
    # The user's scopes are verified when they do something new, which takes some bytes.
    assert abs(measured_bytes - report.measured_peak_bytes) <= 1024
    assert measured_bytes <= report.budget_bytes


def test_several_plans_are_tried_there():
    _, report = recoup.fit(Scoped((2, 5)), odd_batch(), 0.9, loss=mean_square)
    assert report.rounds > 1


def test_a_model_with_a_plan_gets_no_second_one():
    model, batch = blocks(), odd_batch()
    _, report = recoup.fit(model, batch, 0.8, loss=mean_square)
    before = state_of(model)
    for attempt in (
        lambda: recoup.fit(model, batch, 0.7, loss=mean_square),
        lambda: recoup.measure(model, batch, loss=mean_square),
        lambda: recoup.apply_plan(model, report.plan),
        lambda: recoup.apply_plan(nn.Sequential(model), Plan()),
        lambda: recoup.apply_plan(copy.deepcopy(model), report.plan),
    ):
        with pytest.raises(UsageError, match="without a plan or segments"):
            attempt()
    assert list(tree_differences(before, state_of(model), where="")) == []
    report.remove()
    recoup.apply_plan(model, report.plan).remove()


@pytest.mark.parametrize(
    "twin_of",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "pickle"],
)
def test_a_copy_of_a_fitted_model_can_be_fitted_for_itself(twin_of):
    model, batch = blocks(), odd_batch()
    _, report = recoup.fit(model, batch, 0.8, loss=mean_square)
    twin = twin_of(model)
    with pytest.raises(UsageError, match=r"uncheckpoint_module\(the model\)"):
        recoup.fit(twin, batch, 0.9, loss=mean_square)
    recoup.uncheckpoint_module(twin)
    _, another = recoup.fit(twin, batch, 0.9, loss=mean_square)
    assert another.measured_peak_bytes <= another.budget_bytes
    step = lambda of: gradients_after(of, lambda: mean_square(of(batch)).backward())  # noqa: E731
    fitted = step(twin)
    another.remove()
    report.remove()
    assert list(tree_differences(step(model), fitted, where="")) == []


def test_a_fitted_model_can_be_copied_after_a_part_of_it_was_replaced():
    model, batch = blocks(), odd_batch()
    _, report = recoup.fit(model, batch, 0.8, loss=mean_square)
    model[1] = nn.Identity()
    twin = copy.deepcopy(model)
    step = lambda of: gradients_after(of, lambda: mean_square(of(batch)).backward())  # noqa: E731
    found = step(twin)
    report.remove()
    assert list(tree_differences(step(model), found, where="")) == []


def test_a_step_that_runs_an_optimizer_is_refused_before_it_trains():
    model, batch = blocks(), odd_batch()
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        mean_square(model(batch)).backward()
        optimizer.step()

    before = state_of(model)
    with pytest.raises(UsageError, match=r"Adam\.step"):
        recoup.fit(model, step=step, budget=0.8)
    assert list(tree_differences(before, state_of(model), where="")) == []
    assert not optimizer.state
    step()
    assert optimizer.state


def test_an_optimizer_in_backward_hooks_is_refused_too():
    model, batch = blocks(), odd_batch()
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step())
    before = state_of(model)
    with pytest.raises(UsageError, match=r"SGD\.step"):
        recoup.fit(model, batch, 0.8, loss=mean_square)
    assert list(tree_differences(before, state_of(model), where="")) == []


@pytest.mark.parametrize(
    "wrong",
    [
        b"8GiB",
        [8],
        True,
        torch.tensor(8),
        Decimal("0.5"),
        1j,
        0,
        "0",
        0.0,
        float("nan"),
    ],
)
def test_what_is_no_budget_is_refused_before_anything_runs(wrong):
    def step() -> None:
        raise AssertionError

    with pytest.raises(UsageError, match="budget"):
        recoup.fit(blocks(), step=step, budget=wrong)


def test_a_fraction_is_a_share():
    _, report = recoup.fit(blocks(), odd_batch(), Fraction(9, 10), loss=mean_square)  # pyright: ignore[reportArgumentType]
    assert report.budget_bytes == int(report.plain_peak_bytes * Fraction(9, 10))


def test_a_share_may_be_written_in_percent():
    _, report = recoup.fit(blocks(), odd_batch(), "80%", loss=mean_square)
    assert report.budget_bytes == int(report.plain_peak_bytes * 0.8)
    assert report.measured_peak_bytes <= report.budget_bytes


def test_a_share_is_one_of_the_peak_with_the_optimizers_state():
    model, batch = blocks(), odd_batch()
    optimizer = torch.optim.Adam(model.parameters())
    _, report = recoup.fit(model, batch, 1.0, loss=mean_square, optimizer=optimizer)
    assert report.reserved_bytes > 0
    assert report.budget_bytes == report.plain_peak_bytes
    assert "nothing is recomputed" in str(report)


def test_a_frontier_is_that_of_a_model_or_of_its_graph():
    model, batch = blocks(), odd_batch()
    graph = recoup.measure(model, batch, loss=mean_square)
    peaks = [
        {plan.simulation.peak_bytes for plan in plans}
        for plans in (
            recoup.frontier(graph, points=2, allow=[recoup.Action.KEEP]),
            recoup.frontier(model, batch, loss=mean_square, points=2),
        )
    ]
    assert min(peaks[0]) == min(peaks[1])
    with pytest.raises(UsageError, match="expected a measured graph alone"):
        recoup.frontier(graph, batch)

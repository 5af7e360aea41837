"""Gradients that are carried from one backward pass to the next are resident memory."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import recoup
from recoup.backend.memory.meters import StorageMeter


def block(width: int, kind: str) -> nn.Module:
    if kind == "norm":
        return nn.Sequential(
            nn.Linear(width, 2 * width), nn.LayerNorm(2 * width), nn.Tanh(),
            nn.Linear(2 * width, width),
        )  # fmt: skip
    if kind == "dropout":
        return nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width)
        )
    return nn.Sequential(
        nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)
    )


def build(kinds: Sequence[str], width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(block(width, kind) for kind in kinds))


class Checkpointed(nn.Module):
    """The same model with every block in torch's own checkpointing."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        for each in self.model:
            x = checkpoint(each, x, use_reentrant=False)
        return x


def loop(model: Callable[[Tensor], Tensor], batches: Sequence[Tensor]) -> None:
    for batch in batches:
        model(batch).square().mean().backward()


def peak_bytes(model: nn.Module, batches: Sequence[Tensor], run=None) -> int:
    """The peak of the real accumulation loop, gradients of all of it included."""
    run = run or model
    model.zero_grad(set_to_none=True)
    with StorageMeter() as meter:
        meter.track(model, *batches)
        loop(run, batches)
    model.zero_grad(set_to_none=True)
    return meter.peak_bytes


def gradients(model: nn.Module, batches: Sequence[Tensor]) -> list[Tensor]:
    torch.manual_seed(7)
    model.zero_grad(set_to_none=True)
    loop(model, batches)
    found: list[Any] = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


models = st.lists(st.sampled_from(["plain", "norm", "dropout"]), min_size=2, max_size=5)


@settings(max_examples=15, deadline=None)
@given(models, st.sampled_from([8, 32]), st.sampled_from([4, 64]), st.integers(1, 4))
def test_the_loop_stays_within_a_budget_that_torch_meets(kinds, width, rows, count):
    batches = [torch.randn(rows, width) for _ in range(count)]
    model = build(kinds, width)
    expected = gradients(copy.deepcopy(model), batches)
    budget_bytes = peak_bytes(model, batches, Checkpointed(model))
    plain_bytes = peak_bytes(model, batches)
    _, report = recoup.fit(
        model, step=lambda: loop(model, batches), budget=budget_bytes
    )
    assert report.plain_peak_bytes == plain_bytes
    assert report.floor_bytes <= budget_bytes
    assert report.measured_peak_bytes <= budget_bytes
    assert peak_bytes(model, batches) <= budget_bytes
    found = gradients(model, batches)
    assert all(map(torch.equal, expected, found))


@settings(max_examples=15, deadline=None)
@given(models, st.sampled_from([8, 32]), st.sampled_from([4, 64]), st.integers(1, 4))
def test_one_micro_batch_is_fitted_for_all_of_them(kinds, width, rows, count):
    batches = [torch.randn(rows, width) for _ in range(count)]
    model = build(kinds, width)
    others_bytes = sum(batch.nbytes for batch in batches[1:])
    # At least two: with one, nothing is carried.
    carried = batches if count > 1 else batches * 2
    budget_bytes = peak_bytes(model, carried, Checkpointed(model)) - others_bytes
    plain_bytes = peak_bytes(model, carried) - others_bytes
    _, report = recoup.fit(
        model, batches[0], budget_bytes, loss=lambda y: y.square().mean(),
        accumulate=True,
    )  # fmt: skip
    assert report.plain_peak_bytes == plain_bytes
    assert report.measured_peak_bytes <= budget_bytes
    assert peak_bytes(model, batches) <= budget_bytes + others_bytes
    assert all(p.grad is None for p in model.parameters())


def test_gradients_that_are_carried_count_from_the_beginning():
    model, batch = build(["plain"] * 4, 32), torch.randn(8, 32)
    weights = sum(p.nbytes for p in model.parameters())
    reports = []
    for accumulate in (False, True):
        _, report = recoup.fit(
            model, batch, 1.0, loss=Tensor.sum, accumulate=accumulate
        )
        report.remove()
        reports.append(report)
    once, carried = reports
    assert min(once.graph.other_bytes) == weights + batch.nbytes
    assert min(carried.graph.other_bytes) >= 2 * weights + batch.nbytes
    assert carried.plain_peak_bytes > once.plain_peak_bytes


def test_gradients_of_before_are_put_back_whatever_is_carried():
    model, batch = build(["plain"] * 2, 8), torch.randn(4, 8)
    model(batch).sum().backward()
    gradients: list[Any] = [p.grad for p in model.parameters()]
    before = [(gradient, gradient.clone()) for gradient in gradients]
    recoup.fit(model, batch, 1.0, loss=Tensor.sum, accumulate=True)
    for parameter, (gradient, values) in zip(model.parameters(), before, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, values)


def test_frozen_parameters_carry_nothing():
    model, batch = build(["plain"] * 3, 16), torch.randn(4, 16)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    weights = sum(p.nbytes for p in model.parameters())
    _, report = recoup.fit(model, batch, 1.0, loss=Tensor.sum, accumulate=True)
    assert report.graph.other_bytes[0] == weights + trained + batch.nbytes


@pytest.mark.parametrize("sizes", [(64, 64, 16), (16, 64), (64, 16, 64, 16)])
def test_micro_batches_of_several_sizes_share_one_budget(sizes):
    model = build(["plain", "norm", "plain", "norm"], 16)
    batches = [torch.randn(rows, 16) for rows in sizes]
    expected = gradients(copy.deepcopy(model), batches)
    budget_bytes = peak_bytes(model, batches, Checkpointed(model))
    _, report = recoup.fit(
        model, step=lambda: loop(model, batches), budget=budget_bytes
    )
    assert report.plain_peak_bytes == peak_bytes(
        copy.deepcopy(report.remove()), batches
    )
    _, report = recoup.fit(
        model, step=lambda: loop(model, batches), budget=budget_bytes
    )
    for _ in range(3):
        assert peak_bytes(model, batches) <= budget_bytes
        assert all(map(torch.equal, expected, gradients(model, batches)))


def test_a_plan_of_several_passes_is_stored_and_applied_again():
    model = build(["plain", "norm", "plain", "norm"], 16)
    batches = [torch.randn(rows, 16) for rows in (64, 16)]
    expected = gradients(copy.deepcopy(model), batches)
    _, report = recoup.fit(model, step=lambda: loop(model, batches), budget=0.8)
    budget_bytes = report.budget_bytes
    assert len(report.plan.passes) == 2
    stored = recoup.Plan.from_json(report.plan.to_json())
    assert stored == report.plan
    report.remove()
    applied = recoup.apply_plan(model, stored)
    assert all(map(torch.equal, expected, gradients(model, batches)))
    assert peak_bytes(model, batches) <= budget_bytes
    applied.remove()

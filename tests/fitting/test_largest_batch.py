"""The largest batch: it fits, the next one does not, and few sizes are measured."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.core.growth import on_line
from recoup.engine.applied.compiled_blocks import compiled_blocks_in
from recoup.errors import InfeasibleError, UsageError
from recoup.fitting import largest_batch as module
from recoup.fitting.compiled_fit import CompiledFit
from recoup.fitting.largest_batch import largest_batch
from tests.support.bits import tree_differences


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))


def stack() -> nn.Sequential:
    return nn.Sequential(*(layer() for _ in range(4)))


def samples(size: int) -> Tensor:
    return torch.ones(size, 16)


class Attention(nn.Module):
    """Blocks whose memory grows with the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.layers:
            x = each(x + (x @ x.mT).softmax(-1) @ x)
        return x


def sequence(size: int) -> Tensor:
    return torch.ones(1, size, 16)


@pytest.mark.parametrize(
    ("make", "make_batch", "budget"),
    [(stack, samples, 200_000), (Attention, sequence, 150_000)],
    ids=["samples", "length"],
)
def test_the_size_fits_and_the_next_does_not(make, make_batch, budget):
    model = make()
    found = largest_batch(model, make_batch, budget, loss=torch.sum, slowdown=None)
    assert found.measured_peak_bytes <= budget
    assert found.size > found.plain_size > 1
    assert len(found.measured_sizes) <= 7
    with pytest.raises(InfeasibleError):
        recoup.fit(model, make_batch(found.size + 1), budget, loss=torch.sum)


def test_without_a_slowdown_it_is_the_largest_plain_batch():
    model = stack()
    found = largest_batch(model, samples, 200_000, loss=torch.sum, slowdown=0)
    assert found.size == found.plain_size
    peaks = []
    for size in (found.size, found.size + 1):
        _, report = recoup.fit(model, samples(size), 1.0, loss=torch.sum)
        peaks.append(report.remove() and report.plain_peak_bytes)
    assert peaks[0] <= 200_000 < peaks[1]


def test_bytes_at_a_third_size_are_exactly_those_that_are_measured():
    model = stack()
    graphs = {n: recoup.measure(model, samples(n), loss=torch.sum) for n in (3, 8, 24)}
    predicted = on_line(graphs[3], graphs[8], (24 - 3) / (8 - 3))
    assert predicted is not None
    assert predicted.storages == graphs[24].storages
    assert predicted.other_bytes == graphs[24].other_bytes
    assert predicted.own_bytes == graphs[24].own_bytes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("slowdown", [None, 1e6, 0.0])
def test_the_size_is_checked_by_the_executor_that_is_asked_for(slowdown, monkeypatch):
    reports: list[Any] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        fitted = recoup.fit(*args, **kwargs)
        reports.append(fitted[1])
        return fitted

    monkeypatch.setattr(module, "fit", noted)
    model = stack()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    found = largest_batch(
        model,
        samples,
        200_000,
        loss=torch.sum,
        slowdown=slowdown,
        compile="exact",
    )
    assert found.executor == "exact"
    assert "blocks compiled (exact)" in str(found)
    assert all(isinstance(report, CompiledFit) for report in reports)
    if slowdown != 0.0:  # any size that fits is fast enough: the first is the largest
        assert len(reports) == 1
        assert found.size > found.plain_size
    assert found.slowdown in [
        r.predicted_seconds / r.plain_seconds - 1 for r in reports
    ]
    assert found.measured_peak_bytes in [r.measured_peak_bytes for r in reports]
    assert found.measured_peak_bytes <= found.budget_bytes
    # Compiled blocks may be slower, but not too slow for what fits without recoup.
    is_fast = slowdown is None or found.slowdown <= slowdown
    assert is_fast or found.size == found.plain_size
    assert list(tree_differences(before, dict(model.state_dict()), where="")) == []
    assert not compiled_blocks_in(model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_blocks_that_the_user_compiled_are_searched_as_they_were_written():
    plain, compiled = stack(), stack()
    for block in compiled:
        block.compile(backend="eager")
    expected = largest_batch(plain, samples, 200_000, loss=torch.sum, slowdown=None)
    found = largest_batch(
        compiled, samples, 200_000, loss=torch.sum, slowdown=None, compile="exact"
    )
    assert found.size == expected.size
    assert all(block._compiled_call_impl is not None for block in compiled)


def test_steps_with_other_operators_are_not_on_one_line():
    one = recoup.measure(stack(), samples(2), loss=torch.sum)
    other = recoup.measure(Attention(), sequence(2), loss=torch.sum)
    assert on_line(one, other, 2.0) is None


def test_the_model_is_as_before():
    model = nn.Sequential(stack(), nn.BatchNorm1d(16))
    weight = next(model.parameters())
    weight.grad = torch.ones_like(weight)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    random = torch.get_rng_state()
    largest_batch(model, samples, 100_000, loss=torch.sum, slowdown=None, limit=32)
    assert list(tree_differences(before, dict(model.state_dict()), where="")) == []
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert not any(each._forward_hooks for each in model.modules())


def test_room_is_left_for_the_state_of_an_optimizer_and_a_limit_is_kept():
    model = stack()
    adam = torch.optim.Adam(model.parameters())
    found = largest_batch(model, samples, 200_000, loss=torch.sum, slowdown=None)
    with pytest.raises(InfeasibleError):
        recoup.fit(model, samples(found.size), 200_000, loss=torch.sum, optimizer=adam)
    ours = largest_batch(
        model, samples, 200_000, loss=torch.sum, slowdown=None, optimizer=adam
    )
    assert 1 < ours.size < found.size
    limited = largest_batch(model, samples, 200_000, loss=torch.sum, limit=5)
    assert limited.size == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "budget on a CPU"),
        ({"budget": 0.5}, "in bytes"),
        ({"budget": "1MB", "slowdown": -1.0}, "slowdown"),
        ({"budget": "1MB", "limit": 0}, "limit"),
        ({"budget": "1MB", "compile": "fast"}, "compile"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(arguments, words):
    with pytest.raises(UsageError, match=words):
        largest_batch(stack(), samples, loss=torch.sum, **arguments)


def test_a_budget_below_the_smallest_batch_names_the_floor():
    with pytest.raises(InfeasibleError) as caught:
        largest_batch(stack(), samples, 10_000, loss=torch.sum)
    assert caught.value.floor_bytes > 10_000

"""Exact resume and recovery from out of memory in a custom loop."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import recoup
from recoup.checkpointing import is_checkpointed
from recoup.errors import SnapshotError
from recoup.train import ResumableRun, StepRecovery
from tests.support.bits import tree_differences
from tests.support.training import Ceiling

# Torch warns if memory runs out in a hook that is always called.
pytestmark = pytest.mark.filterwarnings("ignore:module forward hook:UserWarning")


def blocks() -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 4)) for _ in range(4)
    )
    return nn.Sequential(*layers).double()


class Loop:
    """A typical loop with dropout, a schedule and a shuffling loader.

    Args:
        optimizers: How many optimizers it has, each with a schedule.
        budget: The model is fitted into this share before the first step.
    """

    def __init__(self, optimizers: int = 1, budget: float | None = None) -> None:
        self.model = nn.Sequential(blocks(), nn.Dropout(0.2))
        parameters = list(self.model.parameters())
        self.optimizers = [
            torch.optim.AdamW(parameters[number::optimizers])
            for number in range(optimizers)
        ]
        self.schedules = [
            torch.optim.lr_scheduler.StepLR(each, 3) for each in self.optimizers
        ]
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=4)
        rows = torch.arange(80, dtype=torch.float64).reshape(20, 4).sin()
        self.loader = DataLoader(TensorDataset(rows, rows), 4, shuffle=True)
        self.run = ResumableRun(
            self.model,
            self.optimizers if optimizers > 1 else self.optimizers[0],
            scheduler=self.schedules if optimizers > 1 else self.schedules[0],
            scaler=self.scaler,
        )
        if budget is not None:
            given = self.optimizers
            recoup.fit(self.model, rows, budget, loss=torch.sum, optimizer=given)
        self.losses: list[float] = []

    def train(self, epochs: int, *, save_at: int = 0, path: Any = None) -> None:
        while self.run.epoch < epochs:
            for inputs, targets in self.run.batches(self.loader):
                loss = functional.mse_loss(self.model(inputs), targets)
                self.scaler.scale(loss).backward()
                for optimizer in self.optimizers:
                    self.scaler.step(optimizer)
                    optimizer.zero_grad()
                self.scaler.update()
                for schedule in self.schedules:
                    schedule.step()
                self.losses.append(loss.item())
                if len(self.losses) == save_at:
                    self.run.save(path)
                    return


@pytest.mark.parametrize("settings", [{}, {"optimizers": 2}, {"budget": 0.8}], ids=str)
@pytest.mark.parametrize("save_at", [3, 5, 8])
def test_a_resumed_loop_ends_bitwise_equal_to_an_uninterrupted_one(
    tmp_path, save_at, settings
):
    whole = Loop(settings.get("optimizers", 1))  # without a plan
    torch.manual_seed(1)
    whole.train(3)
    begun = Loop(**settings)
    torch.manual_seed(1)
    begun.train(3, save_at=save_at, path=tmp_path / "run")
    torch.manual_seed(99)
    resumed = Loop(**settings)
    resumed.run.load(tmp_path / "run")
    resumed.train(3)
    assert begun.losses + resumed.losses == whole.losses
    one, other = (
        [
            dict(part.state_dict())
            for part in (e.model, e.scaler, *e.optimizers, *e.schedules)
        ]
        for e in (whole, resumed)
    )
    assert list(tree_differences(one, other, where="state")) == []


def test_a_file_of_another_kind_is_refused(tmp_path):
    loop = Loop()
    trainer = recoup.Trainer(
        loop.model, loop.optimizers[0], loss_fn=functional.mse_loss
    )
    trainer.save(tmp_path / "trainer")
    with pytest.raises(SnapshotError, match=r"ResumableRun\.save"):
        loop.run.load(tmp_path / "trainer")


def gradients(limit_bytes: int, *, fitted: bool = False, carried: bool = False) -> Any:
    """Return the gradients of a step under a memory limit, and its pieces."""
    model = blocks()
    batch = torch.arange(2048, dtype=torch.float64).reshape(512, 4).cos()
    report = None
    if fitted:
        _, report = recoup.fit(model, batch, 1.0, loss=lambda out: (out**2).mean())
    recovery = StepRecovery(model, report)

    def compute(part, share):
        ((model(part) ** 2).mean() * share).backward()

    if carried:
        compute(batch, 1.0)
    with Ceiling(limit_bytes) as ceiling:
        pieces = recovery.run(compute, batch)
    found = [parameter.grad for parameter in model.parameters()]
    return found, pieces, ceiling, model, recovery


UNLIMITED = 1 << 40


def test_a_step_that_does_not_fit_is_recomputed_then_split():
    expected, pieces, ceiling, *_ = gradients(UNLIMITED)
    assert pieces == 1
    peak = ceiling.peak_bytes
    found, pieces, _, model, recovery = gradients(int(0.6 * peak))
    assert pieces == 1
    assert is_checkpointed(model[0])
    assert all(map(torch.equal, found, expected)), "bitwise: nothing was split"
    recovery.release()
    assert not is_checkpointed(model[0])
    found, pieces, *_ = gradients(int(0.2 * peak))
    assert pieces > 1
    assert all(map(torch.allclose, found, expected))


def test_a_plan_is_tightened_first():
    expected, _, ceiling, *_ = gradients(UNLIMITED)
    found, pieces, _, model, _ = gradients(int(0.8 * ceiling.peak_bytes), fitted=True)
    assert pieces == 1
    assert not is_checkpointed(model[0])
    assert all(map(torch.equal, found, expected))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own
def test_with_compiled_blocks_the_batch_is_computed_in_pieces():
    model = blocks()
    batch = torch.arange(2048, dtype=torch.float64).reshape(512, 4).cos()
    _, report = recoup.fit(model, batch, 1.0, loss=torch.sum, compile="exact")
    runs = []

    def compute(part, share):
        runs.append(share)
        loss = (model(part) ** 2).mean() * share
        if len(runs) == 1:
            raise torch.OutOfMemoryError("a compiler cannot trace a ceiling")
        loss.backward()

    recovery = StepRecovery(model, report)
    assert recovery.run(compute, batch) == recovery.pieces == 2
    assert runs == [1.0, 0.5, 0.5]
    found: list[Any] = [parameter.grad for parameter in model.parameters()]
    assert all(map(torch.allclose, found, gradients(UNLIMITED)[0]))


def test_earlier_gradients_stay_if_memory_ran_out_in_forward():
    expected, _, ceiling, *_ = gradients(UNLIMITED)
    found, pieces, *_ = gradients(int(0.1 * ceiling.peak_bytes), carried=True)
    assert pieces > 1
    for twice, once in zip(found, expected, strict=True):
        assert torch.allclose(twice, 2 * once)


def test_a_step_that_has_added_to_earlier_gradients_is_not_retried():
    layer = nn.Linear(4, 1)
    layer(torch.ones(2, 4)).sum().backward()
    runs = []

    def compute(part, share):
        runs.append(share)
        (layer(part).mean() * share).backward()
        raise torch.OutOfMemoryError("after backward")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        StepRecovery(layer).run(compute, torch.ones(2, 4))
    assert "zero_grad" in caught.value.__notes__[-1]
    assert runs == [1.0]


def test_a_step_that_cannot_fit_raises_with_the_reason():
    with pytest.raises(torch.OutOfMemoryError) as caught:
        gradients(10)
    assert "pieces" in caught.value.__notes__[-1]

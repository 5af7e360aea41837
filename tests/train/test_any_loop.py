"""Exact resume and recovery from out of memory in a custom loop."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import recoup
from recoup.backend.memory.meters import StorageMeter
from recoup.checkpointing import is_checkpointed
from recoup.errors import BudgetWarning, SnapshotError
from recoup.train import ResumableRun, StepRecovery
from tests.support.bits import tree_differences
from tests.support.processes import together
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


EPOCHS, BATCHES, STOP = 4, 10, 14
"""A step has two batches; the run is saved after 7 of 20 steps, within an epoch."""


def wrapped(model: nn.Module, kind: str) -> Any:
    """Return a model as it is, replicated or sharded by the processes."""
    if kind == "replicated":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "sharded":
        for block in model.get_submodule("0").children():
            fully_shard(block)
        fully_shard(model)
    return model


def mean_of_a_pair(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output.float(), target) / 2


def train_in_pairs(
    kind: str, rank: int, budget: Any = None, *, path: Any = "", stop: int = 0
) -> dict[str, Any]:
    """Train in bfloat16 with two batches for each step; save at `stop`, else load."""
    model = wrapped(nn.Sequential(blocks().float(), nn.Dropout(0.2)), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = ResumableRun(model, optimizer)
    rows = torch.arange(4.0 * 64 * BATCHES).reshape(-1, 4).add(rank).sin()
    loader = DataLoader(TensorDataset(rows, rows), 64, shuffle=True)
    autocast = torch.autocast("cpu", torch.bfloat16)

    def rehearse() -> None:
        with autocast:
            loss = mean_of_a_pair(model(rows[:64]), rows[:64])
        loss.backward()

    report: Any = None
    if budget is not None:
        given: dict[str, Any] = {"optimizer": optimizer, "accumulate": True}
        _, report = recoup.fit(model, step=rehearse, budget=budget, **given)
    torch.manual_seed(rank)
    if path and not stop:
        torch.manual_seed(99)
        run.load(path)
    losses: list[float] = []
    peaks: list[int] = []
    while run.epoch < EPOCHS and len(losses) != (stop or -1):
        for batch in run.batches(loader):
            with StorageMeter("cpu") as meter:
                meter.track(model, *batch)
                meter.track(*(p.grad for p in model.parameters() if p.grad is not None))
                for state in optimizer.state.values():
                    meter.track(*state.values())
                with autocast:
                    loss = mean_of_a_pair(model(batch[0]), batch[1])
                loss.backward()
            peaks.append(meter.peak_bytes)
            losses.append(loss.item())
            if len(losses) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            if len(losses) == stop:
                run.save(path)
                break
    state = {
        name: each.to_local() if isinstance(each, DTensor) else each
        for name, each in model.state_dict().items()
    }
    return {"losses": losses, "peaks": peaks, "state": state, "report": report}


def saved_and_resumed(rank: int, kind: str, folder: str, share: float) -> Any:
    """Train plainly, and within a budget with an interruption; return what differs."""
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", BudgetWarning)
    plain = train_in_pairs(kind, rank)
    if kind == "replicated":
        # In its second step DDP replaces its buckets, and the meter sees only new ones.
        del plain["peaks"][1]
    budget, path = int(share * max(plain["peaks"])), Path(folder, "run")
    begun = train_in_pairs(kind, rank, budget, path=path, stop=STOP)
    resumed = train_in_pairs(kind, rank, budget, path=path)
    if kind == "replicated":
        del begun["peaks"][1], resumed["peaks"][1]
    states = plain["state"], resumed["state"]
    return {
        "steps": (len(plain["losses"]), len(resumed["losses"])),
        "losses": (plain["losses"], begun["losses"] + resumed["losses"]),
        "differences": list(tree_differences(*states, where="")),
        "peaks": (max(begun["peaks"] + resumed["peaks"]), budget, max(plain["peaks"])),
    }


def assert_same_run(found: Any) -> None:
    assert isinstance(found, dict), found
    assert found["steps"] == (EPOCHS * BATCHES, EPOCHS * BATCHES - STOP)
    assert found["losses"][0] == found["losses"][1]
    assert found["differences"] == []
    ours, budget, plain = found["peaks"]
    assert ours <= budget < plain


def test_a_loop_in_bfloat16_that_accumulates_resumes_bitwise_within_its_budget(
    tmp_path,
):
    assert_same_run(saved_and_resumed(0, "alone", str(tmp_path), 0.8))


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_a_loop_in_two_processes_resumes_bitwise_within_its_budget(tmp_path, kind):
    found = together(saved_and_resumed, tmp_path, kind, str(tmp_path), 0.9)
    for each in found:
        assert_same_run(each)
    assert found[0]["losses"] != found[1]["losses"], "each has data of its own"

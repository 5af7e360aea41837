"""timm's models, loop and checkpoints: the same training, within the budget."""

# pyright: reportMissingImports=false

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import recoup
from recoup.backend.memory.meters import StorageMeter
from recoup.errors import BudgetWarning
from tests.integrations.test_guides import assert_same_model, run_both
from tests.support.bits import tree_differences
from tests.support.processes import together

pytest.importorskip("timm", reason="timm is not installed")

import numpy as np
import timm
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.models import resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import CheckpointSaver, ModelEmaV3, NativeScaler

EPOCHS, BATCHES, CLASSES = 4, 6, 10

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("error::recoup.errors.BudgetWarning"),
]


class Images:
    """A loader whose batches depend on the epoch and the process alone."""

    def __init__(self, rank: int = 0) -> None:
        self.epoch = 0
        self.rank = rank

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Any:
        torch.manual_seed(2 * self.epoch + self.rank)
        np.random.seed(2 * self.epoch + self.rank)  # noqa: NPY002 (mixup draws from it)
        for _ in range(BATCHES):
            yield torch.randn(16, 3, 64, 64), torch.randint(CLASSES, (16,))
        self.epoch += 1


def parts(rank: int = 0) -> dict[str, Any]:
    """Return the variables of timm's loop before it begins."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=64,
        depth=4,
        embed_dim=64,
        num_heads=4,
        num_classes=CLASSES,
        drop_path_rate=0.1,
    )
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    return {
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "mixup_fn": Mixup(mixup_alpha=0.2, label_smoothing=0.1, num_classes=CLASSES),
        "loss_fn": SoftTargetCrossEntropy(),
        "loader": Images(rank),
        "model_ema": ModelEmaV3(model, decay=0.9),
        "start_epoch": 0,
        "epochs": EPOCHS,
    }


def test_the_guide_to_timm():
    plain, ours = run_both("timm.md", parts)
    assert EPOCHS * BATCHES > 20
    assert_same_model(plain["model"], ours["model"])
    assert_same_model(plain["model_ema"], ours["model_ema"])


def save_together(saver: CheckpointSaver, epoch: int, rank: int | None) -> None:
    """Save in the first process; the others wait for it."""
    if not rank:
        saver.save_checkpoint(epoch)
    if rank is not None:
        distributed.barrier()


def train(
    folder: Path,
    budget: float | None,
    *,
    resume: bool = False,
    epochs: int = EPOCHS,
    rank: int | None = None,
) -> dict[str, Any]:
    """Train as timm's `train.py` does, with two batches for each step.

    With a rank the model is replicated, as there with several processes.
    """
    found = parts(rank or 0)
    model, optimizer = found["model"], found["optimizer"]
    run = model if rank is None else DistributedDataParallel(model)
    schedule = CosineLRScheduler(optimizer, t_initial=EPOCHS)
    scaler = NativeScaler(device="cpu")
    folder.mkdir(exist_ok=True)
    first = 0
    if resume:
        file = str(folder / "last.pth.tar")
        first = resume_checkpoint(model, file, optimizer, scaler, log_info=False)
        averages = torch.load(file, weights_only=False)["state_dict_ema"]
        found["model_ema"].module.load_state_dict(averages)
        schedule.step(first)
        found["loader"].epoch = first
    saver = CheckpointSaver(
        model,
        optimizer,
        model_ema=found["model_ema"],
        amp_scaler=scaler,
        checkpoint_dir=str(folder),
        recovery_dir=str(folder),
    )
    report: Any = None
    peaks, losses = [], []
    for epoch in range(first, epochs):
        for number, batch in enumerate(found["loader"]):
            images, targets = found["mixup_fn"](*batch)

            def forward(images: Any = images, targets: Any = targets) -> Any:
                with torch.autocast("cpu", torch.bfloat16):
                    return found["loss_fn"](run(images), targets)

            if budget is not None and report is None:
                _, report = recoup.fit(
                    run,
                    step=lambda: forward().backward(),
                    budget=budget,
                    optimizer=optimizer,
                    accumulate=True,
                )
            is_last = number % 2 == 1
            no_sync = nullcontext if rank is None or is_last else run.no_sync
            with StorageMeter("cpu") as meter, no_sync():
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                moments = [
                    m for each in optimizer.state.values() for m in each.values()
                ]
                meter.track(model, images, targets, *gradients, *moments)
                loss = forward()
                scaler(
                    loss,
                    optimizer,
                    clip_grad=1.0,
                    parameters=model.parameters(),
                    need_update=is_last,
                )
            peaks.append(meter.peak_bytes)
            losses.append(loss.item())
            if is_last:
                optimizer.zero_grad()
                found["model_ema"].update(model)
        schedule.step(epoch + 1)
        save_together(saver, epoch, rank)
    return {**found, "peaks": peaks, "losses": losses, "report": report}


def test_a_run_that_is_saved_and_resumed_is_bitwise_the_plain_one(tmp_path):
    plain = train(tmp_path / "plain", None)
    begun = train(tmp_path / "ours", 0.75, epochs=2)
    resumed = train(tmp_path / "ours", 0.75, resume=True)
    assert len(plain["losses"]) == EPOCHS * BATCHES
    assert begun["losses"] + resumed["losses"] == plain["losses"]
    for name in ("model", "model_ema", "optimizer"):
        states = plain[name].state_dict(), resumed[name].state_dict()
        assert list(tree_differences(*states, where="")) == []
    for each in (begun, resumed):
        assert max(each["peaks"]) <= each["report"].budget_bytes < max(plain["peaks"])


def train_in_process(rank: int, folder: str) -> tuple[int, bool, bool, list[int]]:
    """Train plainly, and in two runs within a budget.

    Returns the number of losses, whether they and the weights are equal, and the
    largest peaks, of the plain run last, before the budgets.
    """
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", BudgetWarning)
    plain = train(Path(folder, f"plain-{rank}"), None, rank=rank)
    budget = int(0.85 * max(plain["peaks"]))  # with the buckets of DDP
    begun = train(Path(folder, "ours"), budget, epochs=2, rank=rank)
    resumed = train(Path(folder, "ours"), budget, resume=True, rank=rank)
    losses = begun["losses"] + resumed["losses"]
    names = ("model", "model_ema", "optimizer")
    states = [(plain[name].state_dict(), resumed[name].state_dict()) for name in names]
    differences = [list(tree_differences(*pair, where="")) for pair in states]
    peaks = [max(each["peaks"]) for each in (begun, resumed, plain)]
    return (
        len(losses),
        losses == plain["losses"],
        not any(differences),
        [*peaks, budget],
    )


@pytest.mark.slow
def test_two_processes_train_save_and_resume_as_without_recoup(tmp_path):
    for found in together(train_in_process, tmp_path, str(tmp_path), seconds=200):
        count, losses_equal, states_equal, (begun, resumed, plain, budget) = found
        assert count == EPOCHS * BATCHES
        assert losses_equal
        assert states_equal
        assert max(begun, resumed) <= budget < plain

"""A training run that somebody kills: started again, it goes on from its snapshot."""

import random
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from recoup import Trainer
from tests.support.training import make_trainer, samples

EPOCHS, STEPS = 4, 28


def make_run(folder: Path) -> tuple[Trainer, DataLoader]:
    """Make the trainer and its loader, with everything that can go out of step."""
    torch.set_num_threads(1)
    random.seed(0)
    trainer = make_trainer(
        seed=0,
        norm=True,
        precision="fp16",
        average_decay=0.9,
        max_gradient_norm=1.0,
        accumulation_steps=2,
        loss_scale_growth_interval=3,
        snapshot_path=folder / "snapshot",
        snapshot_every_steps=1,
    )
    # 13 batches an epoch: the last step of each has only one.
    loader = DataLoader(TensorDataset(*samples(100)), batch_size=8, shuffle=True)
    return trainer, loader


def run(folder: Path) -> None:
    """Train to the end, writing every loss with its step to a file."""
    trainer, loader = make_run(folder)
    with (folder / "losses").open("a", buffering=1) as file:
        trainer.fit(
            loader,
            epochs=EPOCHS,
            resume=True,
            on_step=lambda step: file.write(f"{step.number} {step.loss.hex()}\n"),
        )
    (folder / "finished").touch()

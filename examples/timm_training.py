"""timm's training loop with one line more: a vision transformer in a budget.

Needs timm. The loop is that of timm's `train.py`: its model, its optimizer, its
augmentation of batches (mixup), its loss and its schedule.
"""

# pyright: reportMissingImports=false

import numpy as np
import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn

import recoup

STEPS, CLASSES = 20, 10


def train(budget: float | None) -> tuple[nn.Module, str]:
    """Train a small vision transformer; return it and the report."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (mixup draws from it)
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
    schedule = CosineLRScheduler(optimizer, t_initial=STEPS, t_in_epochs=False)
    mixup = Mixup(mixup_alpha=0.2, label_smoothing=0.1, num_classes=CLASSES)
    loss_of = SoftTargetCrossEntropy()
    report = None
    for number in range(STEPS):
        images, labels = torch.randn(32, 3, 64, 64), torch.randint(CLASSES, (32,))
        images, targets = mixup(images, labels)
        if budget is not None and report is None:  # the line that recoup adds
            model, report = recoup.fit(
                model, (images, targets), budget, loss=loss_of, optimizer=optimizer
            )
        loss_of(model(images), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step_update(number + 1)
    if report is not None:
        report.remove()
    return model, str(report)


def main() -> None:
    """Train twice and compare every bit."""
    expected, _ = train(None)
    found, report = train(0.6)
    pairs = expected.state_dict().values(), found.state_dict().values()
    assert all(map(torch.equal, *pairs)), "parameters must be equal"
    print(report)
    print("Parameters are bitwise those of the loop without recoup.")


if __name__ == "__main__":
    main()

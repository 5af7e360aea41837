"""A trainer in mixed precision that is interrupted, resumed, and ends the same.

Run it with `python examples/trainer.py`.
"""

import signal
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from recoup import Trainer, TrainerSettings
from recoup.results import RunResult, StepResult

WIDTH, EPOCHS = 32, 3


def make_trainer(snapshot: Path | None = None) -> Trainer:
    """Make a trainer that is the same each time."""
    torch.manual_seed(0)
    blocks = [
        nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        for _ in range(2)
    ]
    model = nn.Sequential(nn.Linear(8, WIDTH), *blocks, nn.Linear(WIDTH, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = TrainerSettings(
        precision="fp16",
        use_gradient_checkpointing=True,
        max_gradient_norm=1.0,
        average_decay=0.9,
        snapshot_path=snapshot,
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    return Trainer(model, optimizer, settings, loss, scheduler=schedule)


def loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Compare the scores of every position with its class."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def loader() -> DataLoader:
    """Make shuffled batches of a fixed set of sequences."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(48, 10, 8, generator=generator)
    targets = inputs[..., :3].argmax(-1)
    return DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)


def interrupt(step: StepResult) -> None:
    """Press Ctrl-C in the eighth step."""
    if step.number == 8:
        signal.raise_signal(signal.SIGINT)


def show(name: str, result: RunResult) -> None:
    last = f"{result.last.loss:.4f}" if result.last is not None else "none"
    print(
        f"{name}: {result.steps} steps, {result.skipped} skipped, last loss {last}"
        + (", interrupted" if result.interrupted else "")
    )


def main() -> None:
    """Train without interruption, then with one, and compare every bit."""
    whole = make_trainer()
    show("whole run", whole.fit(loader(), EPOCHS))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        first = make_trainer(path)
        show("first half", first.fit(loader(), EPOCHS, on_step=interrupt))
        # Another process would begin here, with nothing but the file.
        second = make_trainer(path)
        show("second half", second.fit(loader(), EPOCHS, resume=True))

    expected, found = whole.model.parameters(), second.model.parameters()
    assert all(map(torch.equal, expected, found)), "parameters must be equal"
    print("All parameters are bitwise those of the run without interruption.")


if __name__ == "__main__":
    main()

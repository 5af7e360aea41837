"""Small training runs: models, data, and everything a run leaves behind."""

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from recoup import Trainer, TrainerSettings
from recoup.backend.memory.ledger import storages_in
from tests.support.counting import Watching


class Classifier(nn.Module):
    """Blocks with dropout and, if wanted, batch normalisation, and a head."""

    def __init__(
        self, width: int = 8, *, dropout: float = 0.1, norm: bool = False
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, width),
                nn.BatchNorm1d(width) if norm else nn.LayerNorm(width),
                nn.GELU(),
                nn.Dropout(dropout),
            )
            for _ in range(3)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def samples(count: int = 96, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three clouds of points, of which a line cannot tell all apart."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(3, (count,), generator=generator)
    centres = torch.tensor([[2.0, 0, 0, 1], [0, 2.0, -1, 0], [-2.0, -2.0, 1, 1]])
    noise = torch.randn(count, 4, generator=generator)
    return centres[targets] + noise, targets


def batches(count: int, size: int = 8, *, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Cut the samples into batches."""
    inputs, targets = samples(count * size, seed=seed)
    return list(zip(inputs.split(size), targets.split(size), strict=True))


class CountedSchedule(torch.optim.lr_scheduler.ExponentialLR):
    """A schedule that moves at every step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, gamma=0.9)


def make_trainer(
    *,
    seed: int = 0,
    norm: bool = False,
    dropout: float = 0.1,
    device: torch.device | str = "cpu",
    loss_fn: Callable[..., Tensor] = functional.cross_entropy,
    **settings: Any,
) -> Trainer:
    """Make a trainer from a seed, with a schedule and an optimizer with moments."""
    torch.manual_seed(seed)
    model = Classifier(norm=norm, dropout=dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return Trainer(
        model,
        optimizer,
        TrainerSettings(**settings),
        loss_fn,
        scheduler=CountedSchedule(optimizer),
    )


def remains(trainer: Trainer) -> dict[str, Any]:
    """Return copies of everything that a step may change."""
    found = {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.scheduler.state_dict() if trainer.scheduler else None,
        "average": trainer.average.state_dict() if trainer.average else None,
        "gradients": [p.grad for p in trainer.model.parameters()],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
    }
    return copy.deepcopy(found)


@dataclass
class Ceiling(Watching):
    """Raises what CUDA raises when an operator would bring memory over a limit.

    Counts storages made inside the block that are still alive, as an allocator does.
    """

    limit_bytes: int

    def __post_init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[Any, int]] = {}
        self.raised = 0
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {storage._cdata for storage in storages_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        made = False
        for storage in storages_in(result):
            if storage._cdata not in given:
                made = True
                entry = StorageWeakRef(storage), storage.nbytes()
                self._alive[storage._cdata] = entry
        self._alive = {a: e for a, e in self._alive.items() if not e[0].expired()}
        live = sum(size for _, size in self._alive.values())
        self.peak_bytes = max(self.peak_bytes, live)
        if made and live > self.limit_bytes:
            self.raised += 1
            raise torch.OutOfMemoryError(f"{live} bytes are more than the limit")
        return result


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Begin with the same random numbers, Python's too."""
    torch.manual_seed(seed)
    random.seed(seed)
    yield

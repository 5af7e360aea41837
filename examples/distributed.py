"""Several processes with DistributedDataParallel, compared with the same loop by hand.

Run it with `torchrun --nproc-per-node 2 examples/distributed.py`; started with
`python`, it runs in one process.
"""

import os

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from recoup import Trainer, TrainerSettings

STEPS, WIDTH = 5, 32


def make_model() -> nn.Module:
    """Make the same model in every process, wrapped if there are several."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
        for _ in range(4)
    ]
    model = nn.Sequential(nn.Linear(8, WIDTH), *blocks, nn.Linear(WIDTH, 3))
    return DistributedDataParallel(model) if distributed.is_initialized() else model


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Make this process's part of the data."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(STEPS, 16, 8, generator=generator)
    return [(part, part[:, :3].argmax(1)) for part in inputs]


def by_hand(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> None:
    """Train with torch alone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for inputs, targets in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def by_trainer(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> None:
    """Train with every block recomputed in backward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = TrainerSettings(use_gradient_checkpointing=True)
    Trainer(model, optimizer, settings, nn.functional.cross_entropy).fit(data)


def main() -> None:
    """Train twice and compare every bit."""
    # Set by torchrun.
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    expected, found = make_model(), make_model()
    by_hand(expected, batches(rank))
    by_trainer(found, batches(rank))
    pairs = expected.state_dict().values(), found.state_dict().values()
    assert all(map(torch.equal, *pairs)), "parameters and statistics must be equal"
    count = distributed.get_world_size() if distributed.is_initialized() else 1
    print(f"Process {rank + 1} of {count}: everything is bitwise as by hand.")
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()

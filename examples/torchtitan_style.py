"""Models as torchtitan makes them: blocks compiled and sharded with FSDP2.

Run it with `torchrun --nproc-per-node 2 examples/torchtitan_style.py`.
"""

import os
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from recoup import Trainer, TrainerSettings

STEPS, WIDTH, TOKENS = 20, 32, 64


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input and what the MLP adds to it."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make_model(*, compiled: bool) -> nn.Module:
    """Compile and shard each block, as torchtitan's `parallelize` does."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(3)]
    model = nn.Sequential(nn.Linear(8, WIDTH), *blocks, nn.Linear(WIDTH, 3))
    for block in blocks if compiled else ():
        # Inductor on a GPU; on the CPU it would compile C++ for minutes.
        block.compile(backend="aot_eager", fullgraph=True)
    if distributed.is_initialized():
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss of all tokens."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def train(rank: int, *, compiled: bool, **settings: Any) -> tuple[list[Tensor], int]:
    """Train; return this process's parameters and the largest peak of a step."""
    model = make_model(compiled=compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(model, optimizer, TrainerSettings(**settings), loss_of)
    generator = torch.Generator().manual_seed(rank)
    peaks = [0]
    for _ in range(STEPS):
        inputs = torch.randn(4, TOKENS, 8, generator=generator)
        result = trainer.step((inputs, inputs[..., :3].argmax(-1)))
        peaks.append(result.peak_bytes or 0)
    trainer.release()
    parameters = [
        each.to_local() if isinstance(each, DTensor) else each
        for each in model.parameters()
    ]
    return parameters, max(peaks)


def main() -> None:
    """Train with and without recoup, compiled and eagerly, and compare every bit."""
    if "RANK" in os.environ:  # set by torchrun
        distributed.init_process_group("gloo")
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    count = distributed.get_world_size() if distributed.is_initialized() else 1

    plain, _ = train(rank, compiled=True)
    ours, _ = train(rank, compiled=True, use_gradient_checkpointing=True)
    assert all(map(torch.equal, plain, ours)), "compiled: parameters must be equal"

    # A budget is for blocks that are not compiled beforehand.
    plain, plain_bytes = train(rank, compiled=False, measure_memory=True)
    budget = plain_bytes * 7 // 10
    ours, peak_bytes = train(rank, compiled=False, measure_memory=True, budget=budget)
    assert all(map(torch.equal, plain, ours)), "budget: parameters must be equal"
    assert peak_bytes <= budget, "the budget is kept"
    print(
        f"Process {rank + 1} of {count}: parameters are bitwise those without recoup; "
        f"peak {peak_bytes / plain_bytes:.0%} of the plain one."
    )
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()

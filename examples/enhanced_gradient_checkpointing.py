"""Profiling: measure what each way of placing checkpoints saves, and what it costs.

Run it with `python examples/enhanced_gradient_checkpointing.py`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from recoup import CheckpointProfiler, CheckpointScope, KeepCostly, KeepSmall
from recoup.checkpointing import Policy

BLOCKS, WIDTH, LENGTH = 6, 32, 64
Way = Callable[[nn.ModuleList, Tensor], Tensor]


def network() -> nn.ModuleList:
    """Make transformer blocks, the same ones each time."""
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        for _ in range(BLOCKS)
    )


def plainly(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """Run without regions."""
    for block in blocks:
        x = block(x)
    return x


def per_block(policy: Policy | None = None) -> Way:
    """Give every block a scope of its own."""

    def run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for index, block in enumerate(blocks):
            with CheckpointScope(f"block{index}", policy=policy):
                x = block(x)
        return x

    return run


def every_second(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """Give every second block a scope and leave the others alone."""
    for index, block in enumerate(blocks):
        with CheckpointScope(f"block{index}", enabled=index % 2 == 0):
            x = block(x)
    return x


def measure(name: str, way: Way) -> list[Tensor]:
    """Run a step, print what it saved and cost, and return the gradients."""
    blocks = network()
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)  # dropout
    profiler = CheckpointProfiler()
    with FlopCounterMode(display=False) as flops:
        profiler.start_tracking()
        out = way(blocks, x)
        profiler.stop_tracking()
        out.square().mean().backward()
    share = 100 * profiler.memory_saved() / profiler.plain_bytes()
    print(
        f"{name:24} {profiler.checkpoint_count():2} regions, keeps "
        f"{profiler.kept_bytes() / 2**20:5.2f} MiB, saves {share:3.0f} %, "
        f"{flops.get_total_flops() / 1e6:6.1f} MFLOP"
    )
    return [p.grad for p in blocks.parameters() if p.grad is not None]


def main() -> None:
    """Measure every way and compare its gradients with the plain ones."""
    expected = measure("plain", plainly)
    ways: dict[str, Way] = {
        "every block": per_block(),
        "every second block": every_second,
        "keep costly outputs": per_block(KeepCostly()),
        "keep outputs to 16 KiB": per_block(KeepSmall(16 * 1024)),
    }
    for name, way in ways.items():
        found = measure(name, way)
        assert all(map(torch.equal, found, expected)), f"{name}: gradients differ"
    print("All gradients are bitwise those of the plain run, dropout included.")


if __name__ == "__main__":
    main()

"""A deep network of 50 layers, 128 wide, trained with one scope for every 7 layers.

Run it with `python examples/gradient_checkpointing.py`.
"""

import math

import torch
from torch import Tensor, nn

from recoup import CheckpointProfiler, CheckpointScope
from recoup.backend.memory.meters import StorageMeter

LAYERS, WIDTH, BATCH, STEPS = 50, 128, 256, 3


def network() -> nn.ModuleList:
    """Make the layers, the same ones each time."""
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
        for _ in range(LAYERS)
    )


def forward(layers: nn.ModuleList, x: Tensor, *, segment: int) -> Tensor:
    """Run the layers; `segment` of them share a scope, none if it is zero."""
    for start in range(0, LAYERS, segment or LAYERS):
        with CheckpointScope(f"segment at {start}", enabled=segment > 0):
            for layer in layers[start : start + (segment or LAYERS)]:
                x = layer(x)
    return x


def train(segment: int) -> tuple[list[float], list[Tensor], int, int]:
    """Return the losses, the last gradients, the bytes saved and the peak bytes."""
    layers = network()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, WIDTH, generator=data)
    target = torch.randn(BATCH, WIDTH, generator=data)
    losses, saved_bytes, peak_bytes = [], 0, 0
    for _ in range(STEPS):
        optimizer.zero_grad()
        with StorageMeter() as meter, CheckpointProfiler() as profiler:
            loss = nn.functional.mse_loss(forward(layers, x, segment=segment), target)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        saved_bytes, peak_bytes = profiler.memory_saved(), meter.peak_bytes
    gradients = [p.grad for p in layers.parameters() if p.grad is not None]
    return losses, gradients, saved_bytes, peak_bytes


def main() -> None:
    """Train plainly and with segments of about the square root of the layers."""
    plain_losses, plain_gradients, _, plain_peak = train(segment=0)
    segment = math.isqrt(LAYERS)
    losses, gradients, saved_bytes, peak = train(segment=segment)
    assert losses == plain_losses, "the losses must be the same numbers"
    assert all(map(torch.equal, gradients, plain_gradients)), "gradients must be equal"
    assert peak < plain_peak / 2, "half of the memory is the least to expect"
    print(f"{LAYERS} layers, a scope for every {segment}:")
    print(f"  autograd keeps {saved_bytes / 2**20:.1f} MiB less between the passes")
    print(f"  peak of a step: {plain_peak / 2**20:.1f} -> {peak / 2**20:.1f} MiB")
    print(f"  losses {[round(loss, 4) for loss in losses]}, the same as without")


if __name__ == "__main__":
    main()

"""Offload: what backward needs waits on the host or on disk, and comes back in time.

Run it with `python examples/offload.py`.
"""

import torch
from torch import Tensor, nn

from recoup import CheckpointScope, Disk, Host, Packed
from recoup.tiers import Tier, tier_usage

BLOCKS, WIDTH = 4, 64


class Model(nn.Module):
    """Blocks, each in a scope that keeps what autograd saves in a tier."""

    def __init__(self, store: Tier | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.store = store
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0)
            for _ in range(BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            # Without a store the scope does nothing, and autograd keeps everything.
            enabled = self.store is not None
            with CheckpointScope("block", enabled=enabled, store=self.store):
                x = block(x)
        return x


def gradients(model: Model, x: Tensor) -> list[Tensor]:
    """Run one step and return its gradients."""
    loss = model(x).square().mean()
    away = {name: usage.live_bytes for name, usage in tier_usage().items()}
    print(f"{type(model.store).__name__}: bytes away between the passes: {away}")
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def main() -> None:
    """Run the same step with values in each tier, and compare the gradients."""
    x = torch.linspace(-1, 1, 128 * 4 * WIDTH).reshape(128, 4, WIDTH)
    expected = gradients(Model(None), x)
    for store in (Host(), Disk(smallest_bytes=0), Packed(Host())):
        found = gradients(Model(store), x)
        assert all(map(torch.equal, found, expected)), "gradients must be equal"
    print("All gradients are bitwise those of the plain run.")


if __name__ == "__main__":
    main()

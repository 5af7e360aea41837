"""The manager: accounts for every region of a model, by name and in total.

With `auto_checkpoint=True` it chooses by itself what is recomputed, within its budget.

Run it with `python examples/manager.py`.
"""

import torch
from torch import Tensor, nn

from recoup import CheckpointManager, CheckpointScope

BLOCKS, WIDTH = 4, 32


class Model(nn.Module):
    """Blocks, each in a scope of its own."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scopes = [
            CheckpointScope(f"block{index}", enabled=checkpointed)
            for index in range(BLOCKS)
        ]
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0)
            for _ in range(BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for scope, block in zip(self.scopes, self.blocks, strict=True):
            with scope:
                x = block(x)
        return x


def gradients(model: Model, x: Tensor) -> list[Tensor]:
    """Run one step and return its gradients."""
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def main() -> None:
    """Account for a model, then ask for what is not there yet."""
    x = torch.randn(16, 16, WIDTH, generator=torch.Generator().manual_seed(1))
    model = Model(checkpointed=True)
    manager = CheckpointManager(max_memory_mb=1024, memory_threshold=0.8)
    with manager:
        output = model(x)
    for scope in model.scopes:
        kibibytes = manager.scope_memory_bytes(scope.name) / 1024
        print(f"{scope.name} holds {kibibytes:.1f} KiB")
    print(
        f"together {manager.current_memory_mb:.3f} of "
        f"{manager.memory_threshold * manager.max_memory_mb:.0f} MiB"
    )
    assert len(manager.nodes) == BLOCKS
    manager.clear_all_checkpoints()
    assert manager.total_memory_bytes() == 0, "everything is freed at once"
    del output

    found = gradients(model, x)
    expected = gradients(Model(checkpointed=False), x)
    assert all(map(torch.equal, found, expected)), "gradients must be equal"
    print("All gradients are bitwise those of the plain run.")

    plain = Model(checkpointed=False)
    automatic = CheckpointManager(
        max_memory_mb=2, memory_threshold=0.8, auto_checkpoint=True
    )
    with automatic:
        for _ in range(3):  # the first step is observed, the second measured
            plain.zero_grad()
            found = gradients(plain, x)
    [step] = automatic.steps
    automatic.remove()
    assert all(map(torch.equal, found, expected)), "gradients must be equal"
    print(f"Chosen by itself: {step}.")


if __name__ == "__main__":
    main()

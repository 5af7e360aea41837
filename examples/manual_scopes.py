"""Scopes by hand: layers 1 and 4 are checkpointed, layers 2, 3 and 5 are not.

Run it with `python examples/manual_scopes.py`.
"""

import torch
from torch import Tensor, nn

from recoup import CheckpointManager, CheckpointScope

WIDTH, BATCH = 64, 256


def make_layers() -> list[nn.Module]:
    """Make five large layers, the same ones each time."""
    torch.manual_seed(0)
    return [
        nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        for _ in range(5)
    ]


def run(*, enabled: bool) -> tuple[list[Tensor], dict[str, int]]:
    """Return the gradients, and how often each scope was replayed."""
    layer1, layer2, layer3, layer4, layer5 = layers = make_layers()
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    manager = CheckpointManager()

    with manager:
        with CheckpointScope("layer1", enabled=enabled):
            x1 = layer1(x)

        x2 = layer2(x1)
        x3 = layer3(x2)

        with CheckpointScope("layer4", enabled=enabled):
            x4 = layer4(x3)

        output = layer5(x4)
    loss = output.sum()

    for name in ("layer1", "layer4"):
        kibibytes = manager.scope_memory_bytes(name) / 1024
        print(f"  {name} holds {kibibytes:.0f} KiB for backward")
    nodes = manager.nodes
    # What is inside layer1 and layer4 is recomputed here. `retain_graph` only so
    # that the regions can be asked afterwards.
    loss.backward(retain_graph=True)
    replays = {node.name: node.replay_count for node in nodes}
    gradients = [x.grad, *(p.grad for layer in layers for p in layer.parameters())]
    return [gradient for gradient in gradients if gradient is not None], replays


def main() -> None:
    """Compare scopes that are on with scopes that are off."""
    print("Scopes on:")
    found, replays = run(enabled=True)
    print("Scopes off:")
    expected, nothing = run(enabled=False)
    assert replays == {"layer1": 1, "layer4": 1}, "each is replayed exactly once"
    assert nothing == {}, "a scope that is off does nothing"
    assert len(found) == len(expected) == 21
    assert all(map(torch.equal, found, expected)), "gradients must be equal"
    print(f"Replays: {replays}. All gradients are bitwise equal.")


if __name__ == "__main__":
    main()

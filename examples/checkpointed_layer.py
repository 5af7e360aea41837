"""A layer that checkpoints itself, and a layer that is made to from outside.

Run it with `python examples/checkpointed_layer.py`.
"""

import copy

import torch
from torch import Tensor, nn

from recoup import (
    CheckpointProfiler,
    CheckpointScope,
    checkpoint_module,
    uncheckpoint_module,
)

WIDTH = 64


class CheckpointedLayer(nn.Module):
    """Wraps a layer; its forward is a scope. The wrapper adds a prefix to all keys."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with CheckpointScope("layer"):
            return self.layer(x)


def make_layer() -> nn.Module:
    """Make a layer with BatchNorm, whose statistics must move once a step."""
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.BatchNorm1d(4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, WIDTH),
    )


def step(layer: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor], int]:
    """Return the gradients, the buffers and the regions of one step."""
    layer.zero_grad()
    with CheckpointProfiler() as profiler:
        loss = layer(x).square().mean()
    loss.backward()
    gradients = [p.grad for p in layer.parameters() if p.grad is not None]
    return gradients, list(layer.buffers()), profiler.checkpoint_count()


def main() -> None:
    """Compare both forms with the plain layer."""
    torch.manual_seed(0)
    plain = make_layer()
    x = torch.randn(512, WIDTH)
    wrapped = CheckpointedLayer(copy.deepcopy(plain))
    in_place = checkpoint_module(copy.deepcopy(plain))

    gradients, buffers, regions = step(plain, x)
    assert regions == 0
    for layer in (wrapped, in_place):
        found_gradients, found_buffers, regions = step(layer, x)
        assert regions == 1
        assert all(map(torch.equal, found_gradients, gradients)), "gradients differ"
        assert all(map(torch.equal, found_buffers, buffers)), "statistics differ"
        print(f"{type(layer).__name__}: keys {next(iter(layer.state_dict()))!r}, ...")

    in_place.use_gradient_checkpointing = False  # for the passes that follow
    assert step(in_place, x)[2] == 0
    uncheckpoint_module(in_place)
    assert list(in_place.state_dict()) == list(plain.state_dict())
    print("Gradients and BatchNorm statistics are bitwise those of the plain layer.")


if __name__ == "__main__":
    main()

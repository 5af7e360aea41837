"""Basic concepts: drop one activation, or drop only large ones, and lose no gradient.

Run it with `python examples/simple_checkpointing.py`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from recoup import CheckpointProfiler, CheckpointScope, checkpoint
from recoup.checkpointing import adaptive_checkpoint

THRESHOLD_BYTES = 10 * 1024


def plain(x: Tensor, weight: Tensor) -> Tensor:
    """Compute as if there were no recoup."""
    y = x @ weight
    z = torch.relu(y)
    return (z @ weight).sum()


def with_one_tensor_dropped(x: Tensor, weight: Tensor) -> Tensor:
    """Keep everything but `z`, which backward recomputes."""
    with CheckpointScope("one tensor", use_recomputation=False):
        y = x @ weight
        z = checkpoint(torch.relu(y))
        return (z @ weight).sum()


def with_large_tensors_dropped(x: Tensor, weight: Tensor) -> Tensor:
    """Drop `z` only if it is larger than a threshold."""
    with CheckpointScope("large tensors", use_recomputation=False):
        y = x @ weight
        z = adaptive_checkpoint(torch.relu(y), THRESHOLD_BYTES)
        return (z @ weight).sum()


def with_everything_dropped(x: Tensor, weight: Tensor) -> Tensor:
    """Drop everything that the call computes."""
    return checkpoint(plain, x, weight)


def gradients(function: Callable[[Tensor, Tensor], Tensor], size: int) -> list[Tensor]:
    """Run forward and backward; say what was saved; return the gradients."""
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(size, size, generator=generator).requires_grad_() for _ in range(2)
    ]
    with CheckpointProfiler() as profiler:
        loss = function(*inputs)
    loss.backward()
    print(
        f"  {function.__name__:27} keeps {profiler.kept_bytes():7,} bytes, "
        f"saves {profiler.memory_saved():7,}"
    )
    return [tensor.grad for tensor in inputs if tensor.grad is not None]


def main() -> None:
    """Compare the ways with the plain run, on a large and on a small matrix."""
    for size in (128, 8):
        print(f"{size} x {size} matrices:")
        expected = gradients(plain, size)
        for function in (
            with_one_tensor_dropped,
            with_large_tensors_dropped,
            with_everything_dropped,
        ):
            found = gradients(function, size)
            assert all(map(torch.equal, found, expected)), "gradients must be equal"
    print("All gradients are bitwise those of the plain run.")


if __name__ == "__main__":
    main()

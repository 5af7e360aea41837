"""A loop whose length nobody knows: iterate until nothing changes any more.

Run it with `python examples/loop_unknown_length.py`.
"""

import torch
from torch import Tensor

from recoup import checkpointed_loop
from recoup.schedules import Online


def main() -> None:
    """Differentiate a fixed point through all iterations that led to it."""
    torch.manual_seed(0)
    matrix = (torch.randn(8, 8, dtype=torch.float64) * 0.25).requires_grad_()
    bias = torch.randn(8, dtype=torch.float64, requires_grad=True)

    def step(state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        now, _ = state
        return torch.tanh(matrix @ now + bias), now

    def moves(state: tuple[Tensor, Tensor]) -> bool:
        now, before = state
        return bool((now - before).abs().max() > 1e-12)

    begin = (torch.zeros(8, dtype=torch.float64), torch.ones(8, dtype=torch.float64))
    state, count = begin, 0
    while moves(state):
        state, count = step(state), count + 1
    expected = torch.autograd.grad(state[0].square().sum(), [matrix, bias])

    final, checkpoints = checkpointed_loop(
        step, begin, condition=moves, schedule=Online(slots=6)
    )
    print(f"{count} iterations, {len(checkpoints)} states held")
    found = torch.autograd.grad(final[0].square().sum(), [matrix, bias])
    assert all(map(torch.equal, found, expected)), "gradients must be equal"
    print("All gradients are bitwise those of the plain loop.")


if __name__ == "__main__":
    main()

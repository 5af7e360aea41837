"""A recurrent network over 2000 steps, of which 44 states are held.

Run it with `python examples/long_sequence.py`.
"""

import torch
from torch import Tensor, nn

import recoup

STEPS, WIDTH, BATCH = 2000, 16, 4


class Cell(nn.Module):
    """A gated step of a recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(2 * WIDTH, WIDTH)
        self.new = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, state: Tensor, given: Tensor) -> Tensor:
        both = torch.cat([state, given], dim=-1)
        gate = torch.sigmoid(self.gate(both))
        return gate * state + (1 - gate) * torch.tanh(self.new(both))


def plain_gradients(cell: Cell, start: Tensor, sequence: Tensor) -> list[Tensor]:
    """Keep every step for backward; return the gradients."""
    cell.zero_grad()
    state = start
    for given in sequence:
        state = cell(state, given)
    state.square().mean().backward()
    return [p.grad for p in cell.parameters() if p.grad is not None]


def looped_gradients(
    cell: Cell, start: Tensor, sequence: Tensor
) -> tuple[list[Tensor], int]:
    """Hold few states; return the gradients, and how many states were held."""
    cell.zero_grad()
    state, held = recoup.checkpointed_loop(cell, start, inputs=sequence)
    count = len(held)
    state.square().mean().backward()
    return [p.grad for p in cell.parameters() if p.grad is not None], count


def main() -> None:
    """Compare the plain loop with the checkpointed one."""
    torch.manual_seed(0)
    cell, start = Cell(), torch.zeros(BATCH, WIDTH)
    sequence = torch.randn(STEPS, BATCH, WIDTH)
    expected = plain_gradients(cell, start, sequence)
    found, held = looped_gradients(cell, start, sequence)
    assert len(found) == len(expected) == 4
    assert all(map(torch.equal, found, expected)), "gradients must be equal"
    assert held == 44, "the square root of the number of steps, rounded down"
    print(f"{held} of {STEPS} states were held; all gradients are bitwise equal.")


if __name__ == "__main__":
    main()

"""An LSTM over inputs of its own, with outputs: state, inputs and outputs are trees.

Run it with `python examples/loop_lstm.py`.
"""

import torch
from torch import Tensor, nn

from recoup import checkpointed_loop
from recoup.schedules import Revolve

STEPS, BATCH, WIDTH = 300, 4, 16

State = tuple[Tensor, Tensor]


def main() -> None:
    """Train one step plainly and checkpointed; compare every gradient."""
    torch.manual_seed(0)
    cell = nn.LSTMCell(WIDTH, WIDTH)
    inputs = torch.randn(STEPS, BATCH, WIDTH, requires_grad=True)
    begin = (torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, WIDTH))
    everything = [inputs, *cell.parameters()]

    def step(state: State, row: Tensor) -> tuple[State, Tensor]:
        hidden, memory = cell(row, state)
        return (hidden, memory), hidden.sin()

    state, rows = begin, []
    for row in inputs:
        state, output = step(state, row)
        rows.append(output)
    loss = state[1].square().sum() + torch.stack(rows).mean()
    expected = torch.autograd.grad(loss, everything)

    (final, outputs), checkpoints = checkpointed_loop(
        step,
        begin,
        inputs=inputs,
        with_outputs=True,
        schedule=Revolve(STEPS, slots=8),
    )
    print(f"{len(checkpoints)} states held, {tuple(outputs.shape)} outputs")
    loss = final[1].square().sum() + outputs.mean()
    found = torch.autograd.grad(loss, everything)
    assert all(map(torch.equal, found, expected)), "gradients must be equal"
    print("All gradients are bitwise those of the plain loop, inputs included.")


if __name__ == "__main__":
    main()

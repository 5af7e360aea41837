"""A heat equation: which conductivity leads to a given temperature?

Time steppers have small steps and many of them. The loop of an ordinary function is
found in its source and checkpointed. Run it with `python examples/loop_heat.py`.
"""

import torch
from torch import Tensor

from recoup import grad_with_checkpointing
from recoup.loops import grad

POINTS, STEPS = 64, 400


def temperature(conductivity: Tensor, start: Tensor) -> Tensor:
    """Step the heat equation on a rod with insulated ends."""
    state = start
    for _ in range(STEPS):
        flow = conductivity * (state[1:] - state[:-1])
        zero = flow.new_zeros(1)
        state = state + 0.2 * (torch.cat([flow, zero]) - torch.cat([zero, flow]))
    return state


def misfit(conductivity: Tensor, start: Tensor, wanted: Tensor) -> Tensor:
    """How far the temperature ends from the wanted one."""
    state = start
    for _ in range(STEPS):
        flow = conductivity * (state[1:] - state[:-1])
        zero = flow.new_zeros(1)
        state = state + 0.2 * (torch.cat([flow, zero]) - torch.cat([zero, flow]))
    return (state - wanted).square().sum()


def main() -> None:
    """Descend along checkpointed gradients, and check the first one."""
    place = torch.linspace(0, 1, POINTS, dtype=torch.float64)
    start = torch.exp(-100 * (place - 0.3) ** 2)
    truth = 1 + 0.5 * torch.sin(6 * place[1:])
    wanted = temperature(truth, start)

    conductivity = torch.ones(POINTS - 1, dtype=torch.float64)
    plain = grad(misfit)
    checkpointed = grad_with_checkpointing(misfit, num_checkpoints=20)
    found = [checkpointed(conductivity, start, wanted)]
    expected = [plain(conductivity, start, wanted)]
    assert all(map(torch.equal, found, expected)), "gradients must be equal"

    before = float(misfit(conductivity, start, wanted))
    for _ in range(10):
        conductivity -= 2 * checkpointed(conductivity, start, wanted)
    after = float(misfit(conductivity, start, wanted))
    print(f"misfit {before:.2e}, after ten steps {after:.2e}")
    assert after < before
    print("The gradient is bitwise the same as that of the plain function.")


if __name__ == "__main__":
    main()

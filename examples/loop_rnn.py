"""A recurrent network over 1000 steps: the seed's example, with gradients.

Run it with `python examples/loop_rnn.py`.
"""

import torch
from torch import Tensor

from recoup import checkpointed_loop
from recoup.backend.memory.meters import StorageMeter
from recoup.loops import get_memory_savings
from recoup.schedules import Chunked, Revolve, Schedule

STEPS, WIDTH = 1000, 32


class Network:
    """A recurrent network; its matrix and bias are captured by the step."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        matrix = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        self.matrix = matrix.requires_grad_()
        self.bias = (torch.randn(WIDTH, generator=generator) * 0.01).requires_grad_()
        self.calls = 0

    def step(self, state: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(state @ self.matrix + self.bias)

    def gradients(
        self, *, checkpointed: bool, schedule: Schedule | None = None
    ) -> tuple:
        """Run the loop and return the gradients and the peak in bytes."""
        with StorageMeter() as meter:
            state = torch.zeros(16, WIDTH)
            if checkpointed:
                state, checkpoints = checkpointed_loop(
                    self.step, state, STEPS, schedule=schedule
                )
                print(f"{len(checkpoints):3d} states held instead of {STEPS}", end="; ")
            else:
                for _ in range(STEPS):
                    state = self.step(state)
            found = torch.autograd.grad(state.sum(), [self.matrix, self.bias])
        return found, meter.peak_bytes


def main() -> None:
    """Compare schedules with the plain loop."""
    network = Network()
    expected, plain_bytes = network.gradients(checkpointed=False)
    print(f"plain: {network.calls} evaluations, {plain_bytes / 2**20:.2f} MiB at most")
    schedules: dict[str, Schedule | None] = {
        "square root": None,
        "Revolve, 10 slots": Revolve(STEPS, slots=10),
        "10 slots, tape 20": Chunked(STEPS, slots=10, chunk=20),
    }
    for name, schedule in schedules.items():
        network.calls = 0
        found, peak_bytes = network.gradients(checkpointed=True, schedule=schedule)
        print(f"{name}: {network.calls} evaluations, {peak_bytes / 2**20:.2f} MiB")
        assert all(map(torch.equal, found, expected)), "gradients must be equal"
        assert peak_bytes < plain_bytes / 5
    percent = get_memory_savings(STEPS)["peak_savings_percent"]
    print(f"The square root saves {percent:.1f} % of the states at the peak.")
    print("All gradients are bitwise those of the plain loop.")


if __name__ == "__main__":
    main()

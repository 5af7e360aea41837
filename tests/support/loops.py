"""Loops to compare: plain and checkpointed, by gradients, calls and live bytes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recoup.backend.memory.meters import StorageMeter
from recoup.loops.loop import checkpointed_loop
from recoup.schedules import Chunked, Even, Multistage, Revolve, StoreAll

Loop = Callable[..., Any]


def schedules_for(steps: int) -> list[Any]:
    """One schedule of every kind, for a loop of this length."""
    return [
        StoreAll(steps),
        Even(steps, 3),
        Revolve(steps, slots=1),
        Revolve(steps, slots=3),
        Chunked(steps, slots=2, chunk=4),
        Multistage(steps, (1, 2), chunk=2),
    ]


def plain_loop(func: Callable[..., Any], state: Any, steps: int) -> Any:
    for _ in range(steps):
        state = func(state)
    return state


def checkpointed(**options: Any) -> Loop:
    """A loop function that is checkpointed as asked."""

    def loop(func: Callable[..., Any], state: Any, steps: int) -> Any:
        return checkpointed_loop(func, state, steps, **options)[0]

    return loop


class Recurrence:
    """A recurrence that uses its matrix twice a step, and counts its calls."""

    def __init__(
        self, width: int = 5, seed: int = 0, dtype: Any = torch.float64
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=dtype)

        self.matrix = (draw(width, width) * 0.4).requires_grad_()
        self.bias = (draw(width) * 0.1).requires_grad_()
        self.state = draw(3, width).requires_grad_()
        self.weights = draw(3, width)
        self.calls = 0

    def step(self, state: Tensor) -> Tensor:
        self.calls += 1
        hidden = torch.tanh(state @ self.matrix + self.bias)
        return torch.tanh(hidden @ self.matrix)

    def gradients(self, loop: Loop, steps: int) -> list[Tensor]:
        """Run the loop, and return the final state and the gradients."""
        final = loop(self.step, self.state, steps)
        inputs = [self.state, self.matrix, self.bias]
        found = torch.autograd.grad((final * self.weights).sum(), inputs)
        return [final.detach(), *found]


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes alive at once while it runs, by unique storage."""
    with StorageMeter() as meter:
        run()
    return meter.peak_bytes

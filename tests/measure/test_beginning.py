"""Where runs of a step begin: each is the same step, and all is put back at the end."""

import random

import numpy as np
import torch
from torch import Tensor, nn

from recoup.backend.randomness import random_states
from recoup.core.figures import figures_of
from recoup.measure.beginning import Beginning
from recoup.measure.dry import measure_dry
from recoup.measure.training import training_step, untouched
from tests.support.bits import tree_differences

PROCESSOR = torch.device("cpu")


class Drawing(nn.Module):
    """Draws from every generator, and counts its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(1))
        self.seen: list[tuple[float, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        numbers = random.random(), float(np.random.random())  # noqa: NPY002
        drawn = torch.rand(2)
        self.seen.append((*numbers, *drawn.tolist(), *self.calls.tolist()))
        self.calls += 1
        return (x * self.weight * drawn).sum()


def drawing_step():
    model = Drawing()
    return model, training_step(model, torch.ones(2))


def test_every_run_draws_the_same_and_later_ones_find_the_same_buffers():
    model, described = drawing_step()
    with untouched(described) as step:
        for _ in range(4):
            step.begin()
            step.run()
    *drawn, calls = zip(*model.seen, strict=True)
    assert all(len(set(numbers)) == 1 for numbers in drawn)
    # The first run may set up what later ones find done.
    assert calls == (0, 1, 1, 1)


def test_runs_that_do_not_begin_again_differ():
    model, described = drawing_step()
    with untouched(described) as step:
        for _ in range(4):
            step.run()
    assert all(len(set(numbers)) == 4 for numbers in zip(*model.seen, strict=True))


def test_generators_buffers_and_gradients_are_put_back():
    model, described = drawing_step()
    model.weight.grad = gradient = torch.full((2,), 3.0)
    before = random_states(PROCESSOR).plain()
    with untouched(described) as step:
        for _ in range(3):
            step.begin()
            step.run()
    after = random_states(PROCESSOR).plain()
    assert list(tree_differences(before, after, where="")) == []
    assert model.calls.tolist() == [0.0]
    assert model.weight.grad is gradient
    assert gradient.tolist() == [3.0, 3.0]


def test_a_dry_measurement_draws_the_same_and_puts_generators_back():
    class Shallow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))
            self.depths: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            kept = [block for block in self.blocks if random.random() > 0.5]
            self.depths.append(len(kept))
            for block in kept:
                x = block(x)
            return x.sum() + 0 * sum(p.sum() for p in self.parameters())

    random.seed(1)
    before = random.getstate()
    model = Shallow()
    measure_dry(model, torch.ones(2, 4), figures=figures_of("h200"))
    assert len(model.depths) >= 2
    assert len(set(model.depths)) == 1
    assert random.getstate() == before


def test_buffers_without_memory_are_left_alone():
    with torch.device("meta"):
        model = nn.BatchNorm1d(3)
    beginning = Beginning(model, [])
    beginning.next()
    beginning.next()
    beginning.restore()
    assert model.running_mean is not None
    assert model.running_mean.is_meta

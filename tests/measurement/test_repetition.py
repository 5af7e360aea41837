"""Repeated runs of a step: each is the same step, and none leaves a trace."""

import random
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recoup.backend.state.rng import random_states
from recoup.core.device_figures import figures_of
from recoup.errors import UsageError
from recoup.fitting.measuring import measure_dry
from recoup.measurement.steps.training_step import Repetition, training_step, untouched
from tests.support.bits import tree_differences

CPU = torch.device("cpu")

SEEN: list[tuple[float, ...]] = []
"""What runs observe; a list of a module's own would be restored."""


@pytest.fixture(autouse=True)
def nothing_seen():
    SEEN.clear()


class Drawing(nn.Module):
    """Draws from every generator, and counts its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        numbers = random.random(), float(np.random.random())  # noqa: NPY002
        drawn = torch.rand(2)
        SEEN.append((*numbers, *drawn.tolist(), *self.calls.tolist()))
        self.calls += 1
        return (x * self.weight * drawn).sum()


def drawing_step():
    model = Drawing()
    return model, training_step(model, torch.ones(2))


def test_every_run_draws_the_same_and_later_ones_find_the_same_buffers():
    _, described = drawing_step()
    with untouched(described) as step:
        for _ in range(4):
            step.begin()
            step.run()
    *drawn, calls = zip(*SEEN, strict=True)
    assert all(len(set(numbers)) == 1 for numbers in drawn)
    # The first run may set up what later ones find done.
    assert calls == (0, 1, 1, 1)


def test_runs_that_do_not_begin_again_differ():
    _, described = drawing_step()
    with untouched(described) as step:
        for _ in range(4):
            step.run()
    assert all(len(set(numbers)) == 4 for numbers in zip(*SEEN, strict=True))


def test_generators_buffers_and_gradients_are_put_back():
    model, described = drawing_step()
    model.weight.grad = gradient = torch.full((2,), 3.0)
    before = random_states(CPU).plain()
    with untouched(described) as step:
        for _ in range(3):
            step.begin()
            step.run()
    after = random_states(CPU).plain()
    assert list(tree_differences(before, after, where="")) == []
    assert model.calls.tolist() == [0.0]
    assert model.weight.grad is gradient
    assert gradient.tolist() == [3.0, 3.0]


def test_a_dry_measurement_draws_the_same_and_puts_generators_back():
    class Shallow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            kept = [block for block in self.blocks if random.random() > 0.5]
            SEEN.append((len(kept),))
            for block in kept:
                x = block(x)
            return x.sum() + 0 * sum(p.sum() for p in self.parameters())

    random.seed(1)
    before = random.getstate()
    model = Shallow()
    measure_dry(model, torch.ones(2, 4), figures=figures_of("h200"))
    assert len(SEEN) >= 2
    assert len(set(SEEN)) == 1
    assert random.getstate() == before


def test_buffers_without_memory_are_left_alone():
    with torch.device("meta"):
        model = nn.BatchNorm1d(3)
    repetition = Repetition(model, lambda: None)
    repetition.begin()
    repetition.begin()
    repetition.restore()
    assert model.running_mean is not None
    assert model.running_mean.is_meta


class Replacing(nn.Module):
    """Replaces its buffers instead of writing to them, and makes one at first use."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append((self.mean.sum().item(),))
        y = self.layer(x)
        self.mean = self.mean * 0.5 + y.detach().mean(0) + 1
        if self.late is None:
            self.late = torch.ones(2)
        return (y * self.mean * self.late).sum()


def test_buffers_that_were_replaced_are_put_back_as_the_tensors_they_were():
    model = Replacing()
    mean = model.mean
    with untouched(training_step(model, torch.ones(4, 2))) as step:
        for _ in range(4):
            step.begin()
            step.run()
    assert model.mean is mean
    assert mean.tolist() == [0.0, 0.0]
    assert model.late is None
    assert len(set(SEEN[1:])) == 1


class Weighing(nn.Module):
    """A loss with parameters and statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 1), nn.BatchNorm1d(1)

    def forward(self, output: Tensor) -> Tensor:
        return self.norm(self.layer(output)).square().sum()


def steps_beside_others():
    """Steps that add gradients to more than the model: that, and what they change."""
    model, loss = nn.Linear(2, 2), Weighing()
    x = torch.randn(4, 2, requires_grad=True)

    class Loop:
        def __init__(self) -> None:
            self.parts = {"loss": loss}

        def step(self) -> None:
            self.parts["loss"](model(x)).backward()

    def forward() -> Tensor:
        return loss(model(x))

    yield training_step(model, x, loss=loss), loss, x
    yield training_step(model, x, loss=lambda output: loss(output)), loss, x
    yield training_step(model, step=lambda: forward().backward()), loss, x
    yield training_step(model, step=Loop().step), loss, x


def state_of(*modules: nn.Module) -> list[Tensor]:
    return [tensor.clone() for m in modules for tensor in m.state_dict().values()]


def test_gradients_and_buffers_of_all_that_the_step_refers_to_are_put_back():
    for described, loss, x in steps_beside_others():
        for gradient in (None, torch.ones(4, 2)):
            x.grad = gradient
            before = state_of(loss, described.model)
            with untouched(described) as step:
                for _ in range(2):
                    step.begin()
                    step.run()
                assert x.grad is not None
                assert loss.layer.weight.grad is not None
            assert x.grad is gradient
            assert gradient is None or gradient.tolist() == [[1.0, 1.0]] * 4
            assert loss.layer.weight.grad is None
            after = state_of(loss, described.model)
            assert list(tree_differences(before, after, where="")) == []


def test_a_batch_that_the_step_writes_to_is_put_back():
    seen: list[list[float]] = []

    class Scaling(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
            seen.append(input.tolist())
            return super().forward(input.mul_(2))

    x = torch.ones(2)
    with untouched(training_step(Scaling(2, 1), x)) as step:
        for _ in range(3):
            step.begin()
            step.run()
    assert seen == [[1.0, 1.0]] * 3
    assert x.tolist() == [1.0, 1.0]


def test_a_batch_that_cannot_be_written_to_needs_no_putting_back():
    with torch.inference_mode():
        made = torch.ones(3, 2)
    for batch in (torch.ones(1, 2).expand(3, 2), made):
        described = training_step(nn.Linear(2, 2), batch, loss=Tensor.sum)
        with untouched(described) as step:
            step.begin()
            if batch is not made:
                step.run()


def test_a_model_without_shapes_yet_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lazy = nn.LazyLinear(2)
    with pytest.raises(UsageError, match="call it on a batch first"):
        training_step(lazy, torch.ones(2))


def test_a_step_without_gradients_is_refused():
    step = training_step(nn.Linear(2, 1), torch.ones(2))
    with torch.no_grad(), pytest.raises(UsageError, match="no_grad"):
        step.run()
    step.run()

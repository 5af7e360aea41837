"""fit on models and steps of unusual kinds, and when something goes wrong."""

import random
import warnings
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import recoup
from benchmarks.zoo.cases import CASES
from recoup.backend.memory.meters import StorageMeter
from recoup.backend.state.rng import random_states
from recoup.errors import InfeasibleError
from tests.support.bits import tree_differences
from tests.support.fitting import PROCESSOR, gradients_after, restore, state_of
from tests.support.odd_models import ODD, Perceptron, mean_square, odd_batch
from tests.support.twin import leftovers, seed_generators


def blocks(count: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Perceptron() for _ in range(count)))


def peak_bytes_of(model: nn.Module, step, *resident: Tensor) -> int:
    model.zero_grad(set_to_none=True)
    with StorageMeter() as meter:
        meter.track(model, *resident)
        step()
        peak_bytes = meter.peak_bytes
    model.zero_grad(set_to_none=True)
    return peak_bytes


@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings(
    "ignore:expected a model that keeps its activations:recoup.errors.BudgetWarning"
)
def test_models_of_unusual_kinds_fit_and_give_the_gradients_of_their_twin(name):
    odd = ODD[name]
    model, batch = odd.make(), odd_batch()
    before = state_of(model)

    def step() -> None:
        odd.loss(model(batch)).backward()

    expected = gradients_after(model, step)
    restore(model, before["state"])
    seed_generators(7)
    budget_bytes = int(odd.share * peak_bytes_of(model, step, batch))
    restore(model, before["state"])
    seed_generators(7)
    _, report = recoup.fit(model, batch, budget_bytes, loss=odd.loss)
    found = gradients_after(model, step)
    restore(model, before["state"])
    seed_generators(7)
    measured_bytes = peak_bytes_of(model, step, batch)
    restore(model, before["state"])
    report.remove()
    assert list(tree_differences(expected, found, where="")) == []
    assert list(tree_differences(before, state_of(model), where="")) == []
    assert list(leftovers()) == []
    assert measured_bytes <= budget_bytes
    # What regions copy of small buffers is not predicted.
    assert abs(report.predicted_peak_bytes - measured_bytes) <= 1024


DEPTHS: list[tuple[int, ...]] = []
"""What models of random depth ran; a list of their own would be restored."""


class Shallow(nn.Module):
    """Blocks of which a number is left out that comes from one generator or another."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.blocks = blocks(8)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        kept = [number for number in range(8) if self.draw() > 0.4]
        DEPTHS.append(tuple(kept))
        for number in kept:
            x = self.blocks[number](x)
        return x


DRAWS = {
    "torch": lambda: float(torch.rand(())),
    "python": random.random,
    "numpy": lambda: float(np.random.random()),  # noqa: NPY002
}


@pytest.mark.parametrize("source", DRAWS)
@pytest.mark.parametrize("seed", range(4))
def test_a_model_of_random_depth_is_planned_for_the_step_it_is_checked_on(source, seed):
    model, batch = Shallow(DRAWS[source]), odd_batch()
    DEPTHS.clear()
    seed_generators(seed)
    before = random_states(PROCESSOR).plain()
    _, report = recoup.fit(model, batch, 0.85, loss=mean_square)
    assert report.predicted_peak_bytes == report.measured_peak_bytes
    assert report.rounds == 1
    # The next step of training is the one that was planned for.
    after = random_states(PROCESSOR).plain()
    assert list(tree_differences(before, after, where="")) == []

    def step() -> None:
        mean_square(model(batch)).backward()

    assert peak_bytes_of(model, step, batch) == report.predicted_peak_bytes
    assert len(DEPTHS) == 11  # ten steps of fit, and one
    assert len(set(DEPTHS)) == 1
    # Others differ, so the test could fail. A deeper one may exceed the budget.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", recoup.errors.BudgetWarning)
        model(batch)
        model(batch)
    assert len(set(DEPTHS)) > 1
    report.remove()


class Counting(nn.Module):
    """Blocks of which one more is used in every step, after the first few."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(8)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        for block in list(self.blocks)[: 4 + int(self.steps)]:
            x = block(x)
        self.steps += 1
        return x


def test_a_model_whose_buffers_say_what_it_does_is_planned_for_one_step():
    model, batch = Counting(), odd_batch()
    _, report = recoup.fit(model, batch, 0.85, loss=mean_square)
    assert report.predicted_peak_bytes == report.measured_peak_bytes
    assert report.rounds == 1
    assert int(model.steps) == 0
    report.remove()


def test_other_shapes_than_the_measured_give_the_gradients_of_the_twin():
    case = CASES["gpt"]
    model, batch = case.build("tiny"), case.batch("tiny")
    batches = [
        batch,
        (batch[0][:3], batch[1][:3]),
        (batch[0][:, :16].contiguous(), batch[1][:, :16].contiguous()),
        (batch[0].repeat(2, 1), batch[1].repeat(2, 1)),
    ]

    def stepping(inputs: Tensor, target: Tensor):
        return lambda: case.loss(model(inputs), target).backward()

    expected = [gradients_after(model, stepping(*one)) for one in batches]
    _, report = recoup.fit(model, batch, 0.6, loss=case.loss)
    for one, gradients in zip(batches, expected, strict=True):
        assert (
            list(
                tree_differences(
                    gradients, gradients_after(model, stepping(*one)), where=""
                )
            )
            == []
        )
    smaller = peak_bytes_of(model, stepping(*batches[1]), *batches[1])
    assert smaller <= report.budget_bytes
    with torch.no_grad():
        expected_scores = model.eval()(batch[0])
        report.remove()
        assert torch.equal(model(batch[0]), expected_scores)


class Failing(nn.Module):
    """Blocks of which one raises when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if self.fails and number == 3:
                raise ArithmeticError("as told")
            x = block(x)
        return x


def test_an_exception_inside_a_step_leaves_nothing_behind():
    model, batch = Failing(), odd_batch()
    step = lambda: mean_square(model(batch)).backward()  # noqa: E731
    expected = gradients_after(model, step)
    _, report = recoup.fit(model, batch, 0.6, loss=mean_square)
    model.fails = True
    with pytest.raises(ArithmeticError, match="as told"):
        model(batch)
    assert list(leftovers()) == []
    model.fails = False
    found = gradients_after(model, step)
    report.remove()
    assert list(tree_differences(expected, found, where="")) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ArithmeticError])
@pytest.mark.parametrize("when", [1, 2, 3, 5, 6, 7])
def test_a_fit_that_is_interrupted_leaves_the_model_as_it_was(error, when):
    model, batch = blocks(3), odd_batch()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = state_of(model)
    generator = torch.get_rng_state()
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1
        loss = mean_square(model(batch))
        torch.rand(3)
        if calls == when:
            raise error
        loss.backward()

    with pytest.raises(error):
        recoup.fit(model, step=step, budget=0.7)
    assert list(tree_differences(before, state_of(model), where="")) == []
    assert torch.equal(generator, torch.get_rng_state())
    assert list(leftovers()) == []


class Keyword(nn.Module):
    """Takes keywords and returns an object with the loss in it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()

    def forward(self, *, x: Tensor, scale: float = 1.0) -> SimpleNamespace:
        return SimpleNamespace(loss=mean_square(self.blocks(x)) * scale)


@pytest.mark.parametrize("kind", ["mapping", "step", "tuple", "target"])
def test_a_step_can_be_described_in_several_ways(kind):
    batch = odd_batch()
    model: nn.Module = Keyword() if kind == "mapping" else blocks()
    given = {
        "mapping": {"batch": {"x": batch, "scale": 2.0}},
        "step": {"step": lambda: mean_square(model(batch)).backward()},
        "tuple": {"batch": (batch,), "loss": mean_square},
        "target": {"batch": (batch, batch), "loss": nn.functional.mse_loss},
    }[kind]
    _, report = recoup.fit(model, budget=0.7, **given)
    report.remove()
    assert report.measured_peak_bytes <= report.budget_bytes
    assert report.measured_peak_bytes < report.plain_peak_bytes


def test_room_is_left_for_what_an_optimizer_will_need():
    model, batch = blocks(), odd_batch()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(InfeasibleError) as caught:
        recoup.fit(model, batch, 1000, loss=mean_square, optimizer=optimizer)
    budget_bytes = caught.value.floor_bytes
    assert not optimizer.state
    _, report = recoup.fit(
        model, batch, budget_bytes, loss=mean_square, optimizer=optimizer
    )
    step = lambda: mean_square(model(batch)).backward()  # noqa: E731
    step()
    optimizer.step()
    state = [v for s in optimizer.state.values() for v in s.values()]
    measured_bytes = peak_bytes_of(model, step, batch, *state)
    report.remove()
    assert sum(tensor.nbytes for tensor in state) == report.reserved_bytes
    assert measured_bytes <= budget_bytes


@pytest.mark.parametrize(("share", "steps"), [(0.7, 10), (1.0, 7)])
def test_fitting_takes_ten_steps_or_seven_if_nothing_is_recomputed(share, steps):
    """Warm up, trace, time twice; verify, count bytes; time, in turns with plain."""
    model, batch = blocks(), odd_batch()
    forwards = backwards = 0

    def step() -> None:
        nonlocal forwards, backwards
        forwards += 1
        mean_square(model(batch)).backward()
        backwards += 1

    _, report = recoup.fit(model, step=step, budget=share)
    report.remove()
    assert report.rounds == 1
    assert (forwards, backwards) == (steps, steps)


def test_measuring_takes_four_steps():
    model, batch = blocks(), odd_batch()
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        mean_square(model(batch)).backward()

    recoup.measure(model, step=step)
    assert steps == 4

"""Loops with shared memory, own generators, outputs and regions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from recoup import checkpoint_module, checkpointed_loop
from recoup.errors import MismatchError, UnsupportedError
from recoup.loops.steps import KindError
from recoup.schedules import Even, Revolve
from tests.support.loops import schedules_for

Step = Callable[[Any], Any]


def plainly(step: Step, state: Any, steps: int) -> Any:
    for _ in range(steps):
        state = step(state)
    return state


def writes_to_the_first(state):
    a, b = state
    a.mul_(1.1)
    return a, b


def writes_to_the_second(state):
    a, b = state
    b.add_(a.mean())
    c = a * 0.9
    return c, c


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
@pytest.mark.parametrize("step", [writes_to_the_first, writes_to_the_second])
def test_two_references_to_one_tensor_see_the_same_writes(step, steps):
    def gradient(run: Callable[[Any], Any]) -> tuple[Tensor, ...]:
        x = torch.linspace(0.5, 1.5, 4, dtype=torch.float64).requires_grad_()
        same = x * 2
        first, second = run((same, same))
        (first * 3 + second).sum().backward()
        assert x.grad is not None
        return first.detach(), second.detach(), x.grad

    expected = gradient(lambda state: plainly(step, state, steps))
    for schedule in schedules_for(steps):
        found = gradient(
            lambda state, s=schedule: checkpointed_loop(step, state, steps, schedule=s)[
                0
            ]
        )
        assert all(map(torch.equal, found, expected)), schedule


def test_overlapping_parts_that_are_written_to_are_refused():
    whole = torch.ones(4)

    def step(state):
        state[0].mul_(1.1)
        return state

    with pytest.raises(KindError, match="share memory"):
        checkpointed_loop(step, (whole, whole[:2]), 4)


def test_a_generator_that_the_step_reaches_is_restored():
    def run(*, loop: bool) -> tuple[Tensor, Tensor, Tensor]:
        noise = torch.Generator().manual_seed(1)
        weight = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()

        def step(state: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.tanh(state @ weight)
            return state, (state + torch.randn(4, generator=noise)) @ weight

        if loop:
            (_, outputs), _ = checkpointed_loop(
                step, torch.ones(2, 4), 20, with_outputs=True
            )
        else:
            state, rows = torch.ones(2, 4), []
            for _ in range(20):
                state, row = step(state)
                rows.append(row)
            outputs = torch.stack(rows)
        outputs.square().sum().backward()
        assert weight.grad is not None
        return outputs.detach(), weight.grad, torch.randn(1, generator=noise)

    found, expected = run(loop=True), run(loop=False)
    assert torch.equal(found[0], expected[0])
    assert torch.allclose(found[1], expected[1], rtol=1e-5)
    assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize("schedule", [Even(20, 4), Revolve(20, slots=4)])
def test_outputs_that_differ_in_backward_are_detected(schedule):
    weight = torch.ones(2, requires_grad=True)
    calls = []

    def step(state: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return torch.sin(state * weight), state * weight * len(calls)

    (_, outputs), _ = checkpointed_loop(
        step, torch.ones(2), 20, schedule=schedule, with_outputs=True
    )
    with pytest.raises(MismatchError, match="output"):
        outputs.sum().backward()


@pytest.mark.parametrize(
    "first",
    [
        torch.zeros(2, dtype=torch.long),
        torch.zeros(2, dtype=torch.float16),
        torch.zeros(1, 2),
        torch.zeros(3),
    ],
)
def test_outputs_of_other_shapes_and_types_are_refused(first):
    def step(state: Tensor, index: int) -> tuple[Tensor, Tensor]:
        return state.sin(), first if index == 0 else state

    with pytest.raises(KindError, match="step 1 gave"):
        checkpointed_loop(step, torch.ones(2), 5, with_index=True, with_outputs=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # of 2.15
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_forward_mode_is_refused(needs_gradient):
    weight = torch.ones(2, requires_grad=needs_gradient)

    def loop(x: Tensor) -> Tensor:
        return checkpointed_loop(lambda state: torch.sin(state * weight), x, 5)[0]

    with pytest.raises(UnsupportedError, match="forward-mode"):
        torch.func.jvp(loop, (torch.ones(2),), (torch.ones(2),))
    with pytest.raises(UnsupportedError, match="forward-mode"):
        torch.func.jacfwd(loop)(torch.ones(2))
    with (
        forward_ad.dual_level(),
        pytest.raises(UnsupportedError, match="forward-mode"),
    ):
        loop(forward_ad.make_dual(torch.ones(2), torch.ones(2)))


class Recurrent(nn.Module):
    """Its own method is the step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) / 2)

    def step(self, state: Tensor) -> Tensor:
        return torch.tanh(state @ self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return checkpointed_loop(self.step, x, 5)[0]


def test_a_module_whose_method_is_the_step_may_have_a_region():
    model = Recurrent()
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    (expected,) = torch.autograd.grad(plainly(model.step, x, 5).sum(), model.weight)
    checkpoint_module(model)
    for _ in range(2):
        (found,) = torch.autograd.grad(model(x).sum(), model.weight)
        assert torch.equal(found, expected)

"""Loops that would give wrong gradients are refused, with advice."""

import numpy as np
import pytest
import torch
from torch import Tensor

from recoup.errors import CaptureError, UnsupportedError, UsageError
from recoup.loops import checkpointed_loop, grad


def test_a_step_that_replaces_a_captured_tensor_is_refused():
    captured: dict[str, Tensor | float]
    captured = {"weight": torch.ones(3, requires_grad=True)}

    def step(state: Tensor) -> Tensor:
        state = state * captured["weight"]
        captured["weight"] = 2.0
        return state

    with pytest.raises(CaptureError, match=r"replaces a captured tensor .* its gradi"):
        checkpointed_loop(step, torch.ones(3), 4, 2)


def test_a_second_derivative_past_a_hook_is_refused():
    weight = torch.ones(3, requires_grad=True)
    double = weight * 2

    def step(state: Tensor) -> Tensor:
        return (state * weight * double).sin()

    final, _ = checkpointed_loop(step, torch.ones(3), 4, 2)
    with pytest.raises(UnsupportedError, match="expected no second derivative"):
        torch.autograd.grad(final.sum(), weight, create_graph=True)


def test_the_derivative_of_a_numpy_step_keeps_the_structure_of_the_state():
    def vjp(state, cotangent):
        return cotangent[0]

    def step(state):
        return (state[0] * 2, state[1])

    state = (np.ones(2), np.ones(2))
    final, checkpoints = checkpointed_loop(step, state, 4, 2, vjp=vjp)
    with pytest.raises(UsageError, match="with the pytree structure of the state, got"):
        checkpoints.pull(final)


@pytest.mark.parametrize("given", ["yes", 1.5, [3]])
def test_an_option_that_is_no_mapping_is_refused(given):
    with pytest.raises(UsageError, match="or a mapping for checkpoint=, got"):
        grad(torch.sin, checkpoint=given)


def test_a_function_without_tensors_has_no_gradient():
    derivative = grad(lambda x: 1.0, checkpoint=False)
    with pytest.raises(UsageError, match="a function that returns tensors, got float"):
        derivative(torch.tensor(0.5))

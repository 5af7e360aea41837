"""Source rewriting: a loop that starts over finds all state restored."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from recoup.loops import grad

SHORT = {"min_loop_size": 2, "num_checkpoints": 4}
NORM = nn.BatchNorm1d(4).double()
OWN = torch.Generator()
OWN_NUMPY = np.random.default_rng(0)
OWN_PYTHON = random.Random(0)

# Nothing here is a secret, and old ways to draw numbers are ways to draw numbers.
# ruff: noqa: NPY002


def torch_numbers(x):
    return nn.functional.dropout(x, 0.3)


def python_numbers(x):
    return x * random.random() + OWN_PYTHON.random()


def numpy_numbers(x):
    return x * np.random.rand() + OWN_NUMPY.random()


def numbers_of_a_generator(x):
    return x * torch.rand(4, generator=OWN, dtype=torch.float64)


def running_statistics(x):
    return NORM(x)


def settle():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    OWN.manual_seed(0)
    OWN_PYTHON.seed(0)
    OWN_NUMPY.bit_generator.state = np.random.default_rng(0).bit_generator.state
    NORM.reset_running_stats()


def moved():
    return (
        torch.rand(1).item(),
        random.random(),
        np.random.rand(),
        torch.rand(1, generator=OWN).item(),
        OWN_PYTHON.random(),
        OWN_NUMPY.random(),
        *(buffer.tolist() for buffer in NORM.buffers()),
    )


@pytest.mark.parametrize(
    "draw",
    [
        torch_numbers,
        python_numbers,
        numpy_numbers,
        numbers_of_a_generator,
        running_statistics,
    ],
    ids=lambda draw: draw.__name__,
)
@pytest.mark.parametrize("kind", ["for", "while"])
def test_a_loop_that_falls_back_to_plain_shows_no_effects_of_the_first_attempt(
    draw, kind
):
    def for_loop(x, w):
        best = None
        for i in range(40):
            x = draw(torch.sin(x * w))
            if i == 30:
                best = x
        return (x + best).square()

    def while_loop(x, w):
        best, i = None, 0
        while i < 40:
            x = draw(torch.sin(x * w))
            i = i + 1
            if i == 30:
                best = x
        return (x + best).square()

    function = for_loop if kind == "for" else while_loop
    w = torch.tensor(1.1, dtype=torch.float64)
    x = torch.linspace(-1, 2, 32, dtype=torch.float64).reshape(8, 4)
    settle()
    expected, after = grad(function, (0, 1))(x, w), moved()
    settle()
    with pytest.warns(UserWarning, match="runs plain"):
        found = grad(function, (0, 1), checkpoint=SHORT)(x, w)
    assert all(map(torch.equal, found, expected))
    assert moved() == after

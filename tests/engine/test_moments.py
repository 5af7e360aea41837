"""Layers that draw random numbers and move buffers are run again as they ran."""

import copy
import random
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from recoup import ActivationCheckpointer, CheckpointConfig
from tests.support.bits import tree_differences


def checkpointer(every: int) -> ActivationCheckpointer:
    return ActivationCheckpointer(CheckpointConfig(checkpoint_every_n_layers=every))


class Noisy(nn.Module):
    """Draws from every generator, and moves buffers on, one of them by replacing it."""

    ratio: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("ratio", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.ratio = self.ratio * 0.9
        noise = random.random() + float(numpy.random.rand())  # noqa: NPY002 (a global one)
        return self.dropout(self.norm(self.linear(x))) * noise


class Stack:
    """Layers that only a method of an object sees."""

    def __init__(self, layers: list[Noisy]) -> None:
        self.layers = layers
        self.seen: dict[int, Tensor] = {}

    def run(self, x: Tensor, index: int) -> Tensor:
        out = self.layers[index](x)
        self.seen.setdefault(index, out.detach().clone())
        return out


def everything(layers: list[Noisy]) -> tuple[Any, ...]:
    """Return copies of all that running layers may move on."""
    states = [layer.state_dict() for layer in layers]
    _, key, *rest = numpy.random.get_state()  # noqa: NPY002 (a global one)
    drawn = torch.get_rng_state(), random.getstate(), torch.from_numpy(key), rest
    return copy.deepcopy((states, drawn))


def _run_of(stack: Stack, x: Tensor, index: int) -> Tensor:
    return stack.run(x, index)


@pytest.mark.parametrize("how", ["method", "closure", "partial"])
@pytest.mark.parametrize("every", [0, 2, 3])
@pytest.mark.parametrize("after_backward", [False, True])
def test_it_is_the_activation_of_forward_and_leaves_no_trace(
    how, every, after_backward
):
    stack = Stack([Noisy() for _ in range(5)])
    run = {
        "method": stack.run,
        "closure": lambda x, index: stack.run(x, index),
        "partial": partial(_run_of, stack),
    }[how]
    table = checkpointer(every)
    out = table.checkpointed_forward(torch.randn(16, 8), range(5), run)
    if after_backward:
        out.sum().backward()
    # What the program draws in the meantime is no matter.
    stack.layers[0](torch.randn(4, 8))
    before, ratios = everything(stack.layers), [x.ratio for x in stack.layers]
    for target in (4, 1, 3, 0, 2):
        found = table.recompute_from_checkpoint(target, range(5), run)
        assert torch.equal(found, stack.seen[target])
    now = everything(stack.layers)
    assert list(tree_differences(before, now, where="")) == []
    assert all(x.ratio is r for x, r in zip(stack.layers, ratios, strict=True))


def test_it_leaves_no_trace_after_an_error_either():
    stack = Stack([Noisy() for _ in range(3)])
    table = checkpointer(0)
    table.checkpointed_forward(torch.randn(4, 8), range(3), stack.run)
    before = everything(stack.layers)

    def failing(x: Tensor, index: int) -> Tensor:
        stack.run(x, index)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        table.recompute_from_checkpoint(2, range(3), failing)
    now = everything(stack.layers)
    assert list(tree_differences(before, now, where="")) == []


def test_it_computes_under_the_autocast_of_forward():
    stack = Stack([Noisy() for _ in range(4)])
    table = checkpointer(2)
    with torch.autocast("cpu", torch.bfloat16):
        table.checkpointed_forward(torch.randn(16, 8), range(4), stack.run)
    found = table.recompute_from_checkpoint(3, range(4), stack.run)
    assert found.dtype is stack.seen[3].dtype
    assert torch.equal(found, stack.seen[3])


def test_from_what_was_saved_by_hand_numbers_are_drawn_as_if_now():
    table, drop = checkpointer(2), nn.Dropout(0.5)
    table.save(0, torch.ones(100))
    before = torch.get_rng_state()
    found = table.recompute_from_checkpoint(1, range(2), lambda x, _: drop(x))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found, drop(torch.ones(100)))


@pytest.mark.cuda
@pytest.mark.parametrize("target", range(4))
def test_generators_of_an_accelerator_are_put_back_too(target):
    # The input is not there yet: a layer moves it.
    stack = Stack([Noisy().cuda() for _ in range(4)])
    table = checkpointer(2)

    def run(x: Tensor, index: int) -> Tensor:
        return stack.run(x.cuda(), index)

    table.checkpointed_forward(torch.randn(16, 8), range(4), run)
    before = torch.cuda.get_rng_state()
    found = table.recompute_from_checkpoint(target, range(4), run)
    assert torch.equal(found, stack.seen[target])
    assert torch.equal(torch.cuda.get_rng_state(), before)

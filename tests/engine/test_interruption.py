"""An interrupted call of a checkpointed module leaves no region open for long."""

import copy

import pytest
import torch
from torch import Tensor, nn

from recoup import checkpoint_module, uncheckpoint_module
from recoup.engine.active import open_regions


class Fatal(nn.Module):
    """Is interrupted as often as it is told, and calls itself as deep as it is told."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = inner
        self.interrupts = 0

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        y = self.linear(x).tanh()
        if self.inner is not None:
            y = self.inner(y)
        if depth:
            y = self(y, depth - 1)
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        return y.sin()


def gradients(model: nn.Module, *args: object) -> list[Tensor]:
    found = torch.autograd.grad(model(*args).sum(), list(model.parameters()))
    return list(found)


def interrupt(model: Fatal, *args: object) -> None:
    model.interrupts = 1
    with pytest.raises(KeyboardInterrupt):
        model(*args)


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def test_the_next_call_closes_what_an_interrupt_left_open():
    model = checkpoint_module(Fatal())
    expected = gradients(uncheckpoint_module(copy.deepcopy(model)), X)
    for _ in range(3):
        interrupt(model, X)
        assert len(open_regions()) == 1
    found = gradients(model, X)
    assert not open_regions()
    assert all(map(torch.equal, found, expected))


def test_a_call_of_another_module_closes_it_too():
    model, other = checkpoint_module(Fatal()), checkpoint_module(nn.Linear(4, 4))
    interrupt(model, X)
    other(X)
    assert not open_regions()


def test_taking_the_regions_off_closes_it_too():
    model = checkpoint_module(Fatal())
    interrupt(model, X)
    uncheckpoint_module(model)
    assert not open_regions()


def test_modules_inside_modules_are_closed_from_within():
    inner = checkpoint_module(Fatal())
    outer = checkpoint_module(Fatal(inner))
    inner.interrupts = 1
    with pytest.raises(KeyboardInterrupt):
        outer(X)
    assert len(open_regions()) == 2
    expected = gradients(copy.deepcopy(outer), X)
    assert not open_regions()
    assert all(map(torch.equal, gradients(outer, X), expected))


def test_a_module_that_calls_itself_is_not_taken_for_an_interrupted_one():
    model = checkpoint_module(Fatal())
    plain = uncheckpoint_module(copy.deepcopy(model))
    depths: list[int] = []
    model.linear.register_forward_pre_hook(
        lambda *_: depths.append(len(open_regions()))
    )
    found = gradients(model, X, 2)
    assert depths == [1, 2, 3]
    assert all(map(torch.equal, found, gradients(plain, X, 2)))
    assert not open_regions()


def test_an_ordinary_error_closes_at_once():
    model = checkpoint_module(Fatal())
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 5))
    assert not open_regions()
    model(X)
    assert not open_regions()

"""A backward function that writes to what it saved must not change another's input."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from recoup import CheckpointScope, Host, KeepSmall, rerun
from recoup.errors import ChangedTensorError
from tests.support.twin import plain


class Square(torch.autograd.Function):
    """Squares; its backward reuses the memory of its input."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h * h

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (h,) = ctx.saved_tensors
        return h.mul_(grads[0]).mul_(2)


def square(h: Tensor) -> Any:
    return Square.apply(h)


def whole(w: Tensor) -> Tensor:
    return square(torch.tanh(w * 1.0))  # tanh saves it as well


def view_of_another(w: Tensor) -> Tensor:
    return square(torch.tanh(w * 1.0).view(2, 2)[1:])


def views_of_both(w: Tensor) -> Tensor:
    h = w.exp()
    first = h.view(2, 2)
    return square(first).sum() + (h.view(4, 1) * w.view(4, 1)).sum()


def other_type(w: Tensor) -> Tensor:
    z = torch.view_as_complex(w.view(2, 2) * 1.0).tanh()
    return torch.view_as_real(square(z.conj()).resolve_conj()).sum()


BODIES = [whole, view_of_another, views_of_both]
REGIONS = [
    pytest.param(functools.partial(CheckpointScope, verify="off"), id="recompute"),
    pytest.param(functools.partial(CheckpointScope, verify="always"), id="verified"),
    pytest.param(functools.partial(CheckpointScope, cache=True), id="cached"),
    pytest.param(
        functools.partial(CheckpointScope, policy=KeepSmall(10**9)), id="kept"
    ),
]


def run(body: Callable[[Tensor], Tensor], region: Any) -> Tensor:
    torch.manual_seed(0)
    w = torch.randn(4, requires_grad=True)
    with region("block"):
        y = body(w)
    return torch.autograd.grad(y.sum(), w)[0]


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("body", BODIES)
def test_it_is_an_error_where_the_plain_run_raises(body, region):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(body, plain)
    with pytest.raises(ChangedTensorError):
        run(body, region)


@pytest.mark.parametrize("region", REGIONS[:3])
def test_it_is_an_error_through_a_view_of_another_type(region):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(other_type, plain)
    with pytest.raises(ChangedTensorError):
        run(other_type, region)


@pytest.mark.parametrize("body", BODIES)
def test_it_is_an_error_in_a_function_that_is_called_again(body):
    w = torch.randn(4, requires_grad=True)
    with pytest.raises(ChangedTensorError, match="saved_tensors"):
        rerun(body, w).sum().backward()


@pytest.mark.parametrize("region", REGIONS)
def test_a_tensor_that_nobody_else_needs_may_be_written_to(region):
    def body(w: Tensor) -> Tensor:
        return square(w * 3.0)

    assert torch.equal(run(body, region), run(body, plain))


@pytest.mark.parametrize("body", BODIES)
def test_what_a_tier_keeps_is_brought_back_once_more(body):
    class Pure(torch.autograd.Function):
        """The same function with a backward that writes to nothing."""

        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            ctx.save_for_backward(h)
            return h * h

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            (h,) = ctx.saved_tensors
            return (h * grads[0]).mul_(2)

    found = run(body, functools.partial(CheckpointScope, store=Host(smallest_bytes=0)))
    original = Square.apply
    try:
        Square.apply = Pure.apply
        expected = run(body, plain)
    finally:
        Square.apply = original
    assert torch.equal(found, expected)

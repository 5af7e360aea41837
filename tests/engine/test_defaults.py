"""A replay runs by the defaults of forward, whatever they are in backward."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from recoup import CheckpointScope, rerun
from tests.support.twin import Region, Step, compare

off = functools.partial(CheckpointScope, verify="off")
full = functools.partial(CheckpointScope, verify="full")

MAKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "arange": lambda x: torch.arange(0.1, len(x)),
    "full": lambda x: torch.full((len(x),), 0.1),
    "integers divided": lambda x: torch.arange(1, 1 + len(x)) / 3,
    "integers times a number": lambda x: torch.arange(len(x)) * 0.1,
    "linspace": lambda x: torch.linspace(0.1, 0.9, len(x)),
    "normal": lambda x: torch.normal(0.1, 0.3, (len(x),)),
    "of a tensor": lambda x: x.detach().new_full((len(x),), 0.1),
    "rand": lambda x: torch.rand(len(x)),
    "root of integers": lambda x: torch.arange(len(x)).sqrt(),
    "window": lambda x: torch.hann_window(len(x)),
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def made_under(make: Callable[[Tensor], Tensor], *dtypes: torch.dtype) -> Step:
    """Return a step with one default in forward's two parts each, and in backward."""
    first, second, backward = dtypes

    def step(region: Region) -> dict[str, Any]:
        x = torch.randn(8, dtype=torch.float64, requires_grad=True)
        with region("block"):
            with default_dtype(first):
                y = (x * make(x)).sin()
            with default_dtype(second):
                y = (y * make(x)).exp()
        with default_dtype(backward):
            found = torch.autograd.grad(y.sum(), x)
            now = torch.get_default_dtype()
        return {"y": y, "gradient": found, "default": str(now)}

    return step


ORDERS = [
    (torch.float32, torch.float32, torch.float64),
    (torch.float64, torch.float64, torch.float32),
    (torch.float32, torch.float64, torch.float64),
]


@pytest.mark.parametrize("region", [off, full])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MAKERS)
def test_a_replay_has_forwards_default_type(name, order, region):
    assert compare(made_under(MAKERS[name], *order), region) == []


@pytest.mark.parametrize("name", MAKERS)
def test_a_replay_is_where_forward_was(name):
    def step(region: Region) -> dict[str, Any]:
        x = torch.randn(8, dtype=torch.float64, requires_grad=True)
        with region("block"):
            y = (x * MAKERS[name](x)).sin().exp()
        loss = y.sum()
        torch.set_default_device("meta")
        try:
            found = torch.autograd.grad(loss, x)
        finally:
            torch.set_default_device(None)
        return {"gradient": found}

    assert compare(step, off) == []


@pytest.mark.parametrize("name", MAKERS)
def test_a_function_that_is_run_again_has_forwards_default_type(name):
    x = torch.randn(8, dtype=torch.float64, requires_grad=True)

    def gradient(call: Callable[..., Tensor]) -> Tensor:
        torch.manual_seed(0)
        y = call(lambda t: (t + MAKERS[name](t)).sin().exp(), x)
        with default_dtype(torch.float64):
            found = torch.autograd.grad(y.sum(), x)[0]
            assert torch.get_default_dtype() is torch.float64
        return found

    gradient(rerun)  # the first use is verified
    assert torch.equal(gradient(rerun), gradient(lambda function, t: function(t)))


def test_a_replay_that_raises_leaves_the_default_as_it_was():
    @torch.library.custom_op("recoup_test::raise_again", mutates_args=())
    def raise_again(x: Tensor) -> Tensor:
        if torch.get_default_dtype() is torch.float64 and len(calls) > 0:
            raise ArithmeticError("again")
        calls.append(1)
        return x.clone()

    calls: list[int] = []
    x = torch.randn(8, requires_grad=True)
    with default_dtype(torch.float64), off("block"):
        y = (x * raise_again(torch.arange(8))).sin()
    with pytest.raises(ArithmeticError):
        y.sum().backward()
    assert torch.get_default_dtype() is torch.float32

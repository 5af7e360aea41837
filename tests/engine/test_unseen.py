"""What the tape cannot see is kept, never guessed."""

import ctypes
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from recoup import CheckpointScope
from recoup.errors import MismatchError
from tests.support.counting import Operators
from tests.support.twin import Region, compare

always = functools.partial(CheckpointScope, verify="always")


def fill_by_numpy(target: Tensor, source: Tensor) -> None:
    np.copyto(target.detach().numpy(), source.detach().numpy())


def fill_by_address(target: Tensor, source: Tensor) -> None:
    """Write as a kernel does that is launched without the dispatcher."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


FILLS = [fill_by_numpy, fill_by_address]


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("make", [torch.empty_like, lambda x: x.new_empty(x.shape)])
def test_an_empty_buffer_filled_out_of_sight_is_kept(fill, make):
    def step(region: Region) -> dict[str, Any]:
        x = torch.randn(4, 4, requires_grad=True)
        with region("block"):
            buffer = make(x.detach())
            fill(buffer, x.exp())
            y = (x * buffer.sin()).exp() * (buffer[1:] * x[1:]).sum()
        y.sum().backward()
        return {"x": x.grad}

    assert compare(step, functools.partial(CheckpointScope, verify="off")) == []


@pytest.mark.parametrize("fill", FILLS)
def test_a_known_buffer_written_out_of_sight_is_an_error_at_the_first_use(fill):
    x = torch.randn(4, requires_grad=True)
    with always("block"):
        buffer = torch.zeros(4)
        fill(buffer, x.exp())
        y = (x * buffer.sin()).exp()
    with pytest.raises(MismatchError):
        y.sum().backward()


def topk(x: Tensor) -> Tensor:
    values, places = x.reshape(-1).topk(3)
    return values.exp() * x.reshape(-1)[places]


def nonzero(x: Tensor) -> Tensor:
    return x[x.detach() > 0].exp().sin() * x[(x.detach() > 0).nonzero(as_tuple=True)]


def unique(x: Tensor) -> Tensor:
    values, places = (x.detach() * 2).round().unique(return_inverse=True)
    return x * values.exp()[places]


def multinomial(x: Tensor) -> Tensor:
    places = torch.multinomial(x.softmax(-1), 2)
    return x.gather(1, places).exp().sin()


def read_back(x: Tensor) -> Tensor:
    scale = x.detach().abs().max().item()
    return (x / scale).exp().sin()


def branch(x: Tensor) -> Tensor:
    return x.exp().sin() if bool(x.detach().sum() > 0) else x.sin().exp()


def routed(x: Tensor) -> Tensor:
    scores, expert = x.softmax(-1).max(-1)
    out = torch.zeros_like(x)
    for number in range(4):
        rows = (expert == number).nonzero().squeeze(1)
        out = out.index_add(0, rows, (x[rows] * (number + 1)).tanh())
    return out * scores[:, None]


def sparse_product(x: Tensor) -> Tensor:
    sparse = (x.detach() * (x.detach() > 0)).to_sparse()
    return torch.sparse.mm(sparse, x.exp()).sin()


def sparse_gradient(x: Tensor) -> Tensor:
    sparse = (x * 2).to_sparse()
    return torch.sparse.mm(sparse, x.exp()).sin()


def compressed(x: Tensor) -> Tensor:
    matrix = (x.detach() * (x.detach() > 0)).to_sparse_csr()
    return (matrix @ x.exp()).sin()


def sparse_embedding(x: Tensor) -> Tensor:
    places = torch.tensor([0, 2, 2])
    found = torch.nn.functional.embedding(places, x * 2, sparse=False)
    return found.exp().sin()


BODIES = [
    topk,
    nonzero,
    unique,
    multinomial,
    read_back,
    branch,
    routed,
    sparse_product,
    sparse_gradient,
    compressed,
    sparse_embedding,
]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_what_depends_on_data_or_has_no_storage_is_bitwise_the_twin(body, depth):
    def step(region: Region) -> dict[str, Any]:
        x = torch.randn(4, 4, requires_grad=True)
        if depth == 1:
            with region("block"):
                y = body(x * 2)
        else:
            with region("outer"), region("inner"):
                y = body(x * 2).tanh()
        y.sum().backward()
        return {"x": x.grad, "y": y}

    assert compare(step, always) == []


@pytest.mark.parametrize("body", [topk, multinomial, nonzero])
def test_a_choice_is_made_again_unless_it_was_drawn(body):
    x = torch.randn(4, 4, requires_grad=True)
    with CheckpointScope("block", verify="off"):
        y = body(x * 2)
    with Operators() as operators:
        y.sum().backward()
    assert operators.counts[body.__name__] == (0 if body is multinomial else 1)


def test_a_wrapper_subclass_is_bitwise_the_twin():
    def step(region: Region) -> dict[str, Any]:
        both = TwoTensor(torch.randn(4), torch.randn(4))
        weight = torch.randn(4, requires_grad=True)
        with region("block"):
            y: Any = (both * weight).exp().sin()
        gradient: Any = torch.autograd.grad(y.sum(), weight)[0]
        return {"gradient": [gradient.a, gradient.b], "y": [y.a, y.b]}

    assert compare(step, always) == []


def test_plain_tensors_beside_a_wrapper_subclass_are_still_recomputed():
    x = torch.randn(4, requires_grad=True)
    both = TwoTensor(torch.randn(4), torch.randn(4))
    with CheckpointScope("block", verify="off"):
        y = x.exp().sin()
        z = both * 2
    with Operators() as operators:
        y.sum().backward()
    assert (operators.counts["exp"], operators.counts["sin"]) == (1, 0)
    del z

"""What is recorded, and what is kept because a second run might differ or stall."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from recoup import CheckpointScope
from recoup.engine.recording.region import Region
from tests.support.twin import Region as Regions
from tests.support.twin import compare

ORDER = torch.arange(7, -1, -1)
GATHERS = [
    pytest.param(lambda t: t[ORDER.expand(t.numel() // 8, 8)], id="integers"),
    pytest.param(lambda t: t[t > 0.5], id="mask"),
    pytest.param(lambda t: t.masked_select(t > 0.5), id="masked_select"),
]


def kept_operators(run) -> set[str]:
    scope = CheckpointScope("recorded")
    x = torch.linspace(-1, 1, 8, requires_grad=True)
    with scope:
        run(x)
    return set(scope.kept_operators)


def test_a_copy_to_another_device_is_kept():
    assert kept_operators(lambda x: (x * 2).to("meta")) == {"aten._to_copy.default"}


def test_a_conversion_on_the_same_device_is_recorded():
    assert kept_operators(lambda x: (x * 2).to(torch.bfloat16)) == set()
    assert kept_operators(lambda x: (x * 2).to("cpu", torch.bfloat16)) == set()


def test_draws_of_places_are_kept():
    drawn = kept_operators(lambda x: x.exp().multinomial(2, replacement=True))
    assert drawn == {"aten.multinomial.default"}


@pytest.mark.parametrize("gathers", GATHERS)
def test_what_is_gathered_by_choices_is_recorded(gathers):
    assert kept_operators(lambda x: gathers(x.exp()).sin()) == set()


@pytest.mark.parametrize("gathers", GATHERS)
def test_what_is_gathered_is_not_held_and_comes_back_bitwise(gathers):
    def step(region: Regions) -> dict[str, Any]:
        x = torch.randn(8, requires_grad=True)
        with region("gather"):
            y = gathers(x.exp()).sin()
        y.sum().backward()
        return {"x": x.grad, "y": y}

    assert compare(step, partial(CheckpointScope, verify="always")) == []
    x = torch.linspace(-1, 1, 64, requires_grad=True)
    with CheckpointScope("gather", verify="off") as scope:
        y = gathers(x.exp().expand(16, 64).reshape(-1))
        y = y.sin()
    index_bytes = ORDER.nbytes
    assert y.nbytes > x.nbytes + index_bytes >= scope.memory_bytes


def test_random_operators_are_recorded():
    assert kept_operators(lambda x: nn.functional.dropout(x.exp(), 0.5).sin()) == set()


def test_a_tensor_that_only_lends_its_shape_is_not_computed_again():
    x = torch.linspace(-1, 1, 8, requires_grad=True)
    scope = CheckpointScope("shape", verify="off")
    with scope:
        y = x.cos()
        z = (torch.zeros_like(y) + x).exp()
    (node,) = scope.nodes
    del y
    assert isinstance(node.region, Region)
    z.sum().backward(retain_graph=True)
    names = {str(operation.operator) for operation in node.region.tape.operations}
    assert names == {"aten.zeros_like.default", "aten.add.Tensor", "aten.exp.default"}


def test_a_complex_operator_that_is_kept_gives_the_plain_result():
    a = torch.randn(4, 3, dtype=torch.complex128)
    b = torch.randn(4, 2, dtype=torch.complex128)
    plain = torch.linalg.lstsq(a, b, driver="gels").residuals
    with CheckpointScope("least squares"):
        inside = torch.linalg.lstsq(a, b, driver="gels").residuals
    assert torch.equal(inside, plain)

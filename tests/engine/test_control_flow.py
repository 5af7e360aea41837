"""Control flow as an operator is kept whole; everything around it is recomputed."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

from recoup import CheckpointScope
from recoup.engine.recording.region import Region
from tests.support import twin
from tests.support.twin import compare, plain

always = functools.partial(CheckpointScope, verify="always")


def cond(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))


def cond_with_closure(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda t: t.sin() * x, lambda t: t + x, (x,))


def mapped(x: Tensor) -> Any:
    function: Any = lambda row: row.sin() * row  # noqa: E731 (its type is wrong)
    return map_rows(function, x)


def scanned(x: Tensor) -> Tensor:
    return scan(lambda carry, row: (carry + row.sin(), carry * row), x[0] * 0, x)[1]


def associative(x: Tensor) -> Any:
    return associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic")


def looped(x: Tensor) -> Tensor:
    start = (torch.tensor(0), x.detach())
    _, found = while_loop(lambda n, _: n < 3, lambda n, y: (n + 1, y.sin()), start)
    return x * found


def flexible(x: Tensor) -> Tensor:
    rows = x.detach().reshape(1, 1, 4, 4)
    found = flex_attention(rows, rows, rows)
    assert isinstance(found, Tensor)
    return x * found.reshape(4, 4)


BODIES = [
    cond,
    cond_with_closure,
    mapped,
    scanned,
    associative,
    looped,
    flexible,
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("body", BODIES)
def test_control_flow_in_a_region_is_bitwise_the_twins(body, depth):
    def step(region: twin.Region) -> dict[str, Any]:
        x = torch.randn(4, 4, requires_grad=True)
        with region("outer") if depth == 2 else plain(), region("inner"):
            y = body(x * 2).sin() * 2
        y.sum().backward()
        return {"x": x.grad, "y": y}

    assert compare(step, always) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_it_is_counted_as_kept_and_what_leads_to_it_is_recomputed():
    x = torch.randn(4, 4, requires_grad=True)
    scope = CheckpointScope("block", verify="off")
    with scope:
        y = cond(x.exp()).sin()
    assert scope.kept_operators["cond"] == 1
    (node,) = scope.nodes
    assert isinstance(node.region, Region)
    y.sum().backward(retain_graph=True)
    # The operand of `cond`, which backward needs; what it returned is held.
    assert node.region.replayed_operators == 1

"""Time grows with what a program does: with views, backwards, writes and nesting."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recoup import CheckpointScope
from tests.support.counting import Operators
from tests.support.work import growth

LINEAR = 2.2


def scope() -> CheckpointScope:
    return CheckpointScope("block", verify="off")


def weight() -> Tensor:
    return torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()


def views_of_one_value(n: int) -> None:
    w = weight()
    with scope():
        given = torch.ones(n, 2, 4) * w[0]
        h = torch.zeros(2, 4)
        for t in range(n):
            h = torch.tanh(h @ w + given[t])
    h.sum().backward()


def backwards_through_one_region(n: int) -> None:
    w = weight()
    with scope():
        losses = [torch.tanh(x @ w).sin().sum() for x in torch.ones(n, 4)]
    for loss in losses:
        loss.backward()


def backwards_that_share_what_is_not_saved(n: int) -> None:
    w = weight()
    with scope():
        shared = w.detach() + 1
        for _ in range(n):
            shared = shared + 1
        losses = [(shared * k * w).sin().sum() for k in range(4)]
    for loss in losses:
        loss.backward()


def one_backward_after_another_through_a_trunk(n: int) -> None:
    w = weight()
    with scope():
        h, loss = w.detach() + 1, torch.zeros(())
        for _ in range(n):
            h = h + 1
            loss = loss + ((h * 2) * w).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def depth(n: int) -> None:
    w, x = weight(), torch.ones(4)
    with contextlib.ExitStack() as stack:
        for _ in range(n):
            stack.enter_context(scope())
        for _ in range(8):
            x = torch.tanh(x @ w)
    x.sum().backward()


def parameters_of_a_nested_region(n: int) -> None:
    weights = [weight() for _ in range(n)]
    x = torch.ones(4)
    with scope(), scope():
        for w in weights:
            x = torch.tanh(x @ w)
    x.sum().backward()


def writes_after_saved_versions(n: int) -> None:
    w, results = weight(), []
    with scope():
        h = w * 2
        for _ in range(n):
            results.append(h.sin())
            h.add_(1)
    torch.stack(results).sum().backward()


def changes_of_shape(n: int) -> None:
    w = weight()
    with scope():
        total = w.sin()
        for _ in range(n):
            total = total * torch.ones(4, 4).t_()
    total.sum().backward()


STEPS: dict[Callable[[int], None], int] = {
    views_of_one_value: 96,
    backwards_through_one_region: 16,
    backwards_that_share_what_is_not_saved: 16,
    one_backward_after_another_through_a_trunk: 16,
    depth: 8,
    parameters_of_a_nested_region: 96,
    writes_after_saved_versions: 96,
    changes_of_shape: 96,
}


@pytest.mark.parametrize(("step", "size"), STEPS.items())
def test_work_is_linear(step, size):
    assert growth(step, size) < LINEAR


def test_the_counter_sees_a_search_that_is_quadratic():
    def search(n: int) -> None:
        found: list[int] = []
        for k in range(n):
            for other in found:
                assert other != k
            found.append(k)

    assert growth(search, 16, str(Path(__file__).parent)) > 3.5


@pytest.mark.parametrize(("levels", "every"), [(130, 1), (300, 60)])
def test_scopes_nest_as_deep_as_python_calls(levels, every):
    w, plain, x = weight(), weight(), torch.ones(4)
    with contextlib.ExitStack() as stack:
        for level in range(levels):
            stack.enter_context(scope())
            if level % every == 0:
                x = torch.tanh(x @ w)
    (ours,) = torch.autograd.grad(x.sum(), w)
    y = torch.ones(4)
    for _ in range(0, levels, every):
        y = torch.tanh(y @ plain)
    (twins,) = torch.autograd.grad(y.sum(), plain)
    assert torch.equal(ours, twins)


def test_an_error_in_the_outermost_of_many_regions_reaches_the_user():
    w, x = weight(), torch.ones(4)
    with contextlib.ExitStack() as stack:
        x = torch.tanh(x @ w)
        for _ in range(150):
            stack.enter_context(scope())
        x = torch.tanh(x @ w)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        x.sum().backward()


def test_a_second_backward_runs_only_what_it_needs():
    w = weight()
    with scope():
        losses = [torch.tanh((w * k).sin()).sum() for k in range(8)]
    losses[0].backward()
    with Operators() as operators:
        losses[1].backward()
    assert operators.counts["tanh"] == operators.counts["sin"] == 1

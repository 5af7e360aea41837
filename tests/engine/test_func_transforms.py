"""Forward mode and torch.func through a region: the right answer or our error."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from recoup import (
    CheckpointGroup,
    CheckpointScope,
    checkpoint,
    checkpoint_module,
    rerun,
)
from recoup.engine.recording.active import open_regions
from recoup.errors import RecoupError, UnsupportedError
from tests.support.twin import Region, Step, compare, leftovers

always = functools.partial(CheckpointScope, verify="always")


def forward_mode_inside(x: Tensor, tangent: Tensor, region: Region) -> Any:
    with forward_ad.dual_level(), region("block"):
        dual = forward_ad.make_dual(x, tangent)
        value, derivative = forward_ad.unpack_dual(dual.exp().sin())
        assert derivative is not None
    return value, derivative, torch.autograd.grad(derivative.sum(), x)


def forward_mode_outside(x: Tensor, tangent: Tensor, region: Region) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        with region("block"):
            y = dual.exp().sin()
        value, derivative = forward_ad.unpack_dual(y)
        assert derivative is not None
    return value, derivative, torch.autograd.grad(derivative.sum(), x)


def grad_inside(x: Tensor, tangent: Tensor, region: Region) -> Any:
    with region("block"):
        found = torch.func.grad(lambda t: (t.exp() * tangent).sin().sum())(x * 2)
    return torch.autograd.grad(found.sum(), x)


def grad_outside(x: Tensor, tangent: Tensor, region: Region) -> Any:
    def function(t: Tensor) -> Tensor:
        with region("block"):
            return (t.exp() * tangent).sin().sum()

    return torch.func.grad(function)(x)


def vmap_inside(x: Tensor, tangent: Tensor, region: Region) -> Any:
    with region("block"):
        y = torch.func.vmap(lambda t: (t.exp() * t).sin())(x.view(-1, 1) * 2)
    return torch.autograd.grad(y.sum(), x)


def vmap_outside(x: Tensor, tangent: Tensor, region: Region) -> Any:
    def function(t: Tensor) -> Tensor:
        with region("block"):
            return (t.exp() * t).sin()

    y = torch.func.vmap(function)(x.view(-1, 1) * 2)
    return torch.autograd.grad(y.sum(), x)


def jvp_inside(x: Tensor, tangent: Tensor, region: Region) -> Any:
    with region("block"):
        found = torch.func.jvp(lambda t: (t.exp() * t).sin(), (x * 2,), (tangent,))
    return found, torch.autograd.grad(found[1].sum(), x)


def jvp_outside(x: Tensor, tangent: Tensor, region: Region) -> Any:
    def function(t: Tensor) -> Tensor:
        with region("block"):
            return (t.exp() * t).sin()

    return torch.func.jvp(function, (x,), (tangent,))


def jvp_of_captured(x: Tensor, tangent: Tensor, region: Region) -> Any:
    scale = torch.ones(3).mul_(2)  # at another version than a wrapper of it

    def function(t: Tensor) -> Tensor:
        with region("block"):
            return (t * scale * x).sin()

    value, derivative, *_ = torch.func.jvp(function, (tangent,), (tangent,))
    return torch.autograd.grad((value * derivative).sum(), x)


def jacfwd_outside(x: Tensor, tangent: Tensor, region: Region) -> Any:
    weight = x[:, None] * torch.randn(3, 3)

    def function(t: Tensor) -> Tensor:
        with region("block"):
            return (weight @ t).sin().exp()

    return torch.autograd.grad(torch.func.jacfwd(function)(tangent).sum(), x)


def hessian_outside(x: Tensor, tangent: Tensor, region: Region) -> Any:
    def function(t: Tensor) -> Tensor:
        with region("block"):
            return (t.exp() * tangent).sin().sum()

    return torch.func.hessian(function)(x)


def functional_call(x: Tensor, tangent: Tensor, region: Region) -> Any:
    layer = nn.Linear(3, 3)
    weights = {"weight": x[:, None] * tangent, "bias": x * 2}
    with region("block"):
        y = torch.func.functional_call(layer, weights, (tangent,)).exp()
    return torch.autograd.grad(y.sum(), x)


TRANSFORMS = [
    forward_mode_inside,
    forward_mode_outside,
    grad_inside,
    grad_outside,
    vmap_inside,
    vmap_outside,
    jvp_inside,
    jvp_outside,
    jvp_of_captured,
    jacfwd_outside,
    hessian_outside,
    functional_call,
]


def through(transform: Any) -> Step:
    def step(region: Region) -> dict[str, Any]:
        x, tangent = torch.randn(3, requires_grad=True), torch.randn(3)
        return {"found": transform(x, tangent, region)}

    return step


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_gives_the_twins_answer_or_our_clear_error(transform):
    try:
        assert compare(through(transform), always) == []
    except RecoupError as error:
        assert isinstance(error, UnsupportedError)  # noqa: PT017 (either is right)
    assert list(leftovers()) == []
    assert not open_regions()


CARRIED = [
    forward_mode_inside,
    forward_mode_outside,
    vmap_inside,
    vmap_outside,
    jvp_inside,
    jvp_outside,
    jvp_of_captured,
    jacfwd_outside,
    functional_call,
]


@pytest.mark.parametrize("transform", CARRIED)
def test_a_transform_that_needs_no_hooks_is_not_refused(transform):
    assert compare(through(transform), always) == []


def transforming(x: Tensor) -> Tensor:
    return torch.func.grad(lambda t: t.exp().sin().sum())(x)


def in_a_function(x: Tensor) -> None:
    checkpoint(transforming, x)


def in_a_module(x: Tensor) -> None:
    class Transforming(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return transforming(x)

    checkpoint_module(Transforming())(x)


def in_a_group(x: Tensor) -> None:
    CheckpointGroup().checkpoint_fn(x, transforming)


def test_in_a_module_torchs_own_error_says_what_to_do():
    with pytest.raises(RuntimeError, match="saved tensor hooks") as caught:
        in_a_module(torch.randn(3, requires_grad=True))
    assert "torch.autograd.grad" in caught.value.__notes__[0]
    assert list(leftovers()) == []


@pytest.mark.parametrize("attempt", [in_a_function, in_a_group])
def test_every_form_of_region_refuses_what_it_cannot_carry_by_our_error(attempt):
    with pytest.raises(UnsupportedError):
        attempt(torch.randn(3, requires_grad=True))
    assert list(leftovers()) == []


def test_disabled_saved_tensor_hooks_are_refused_by_our_error():
    x = torch.randn(3, requires_grad=True)
    message = "no hooks here"
    with (
        torch.autograd.graph.disable_saved_tensors_hooks(message),
        pytest.raises(UnsupportedError, match=message),
        always("block"),
    ):
        x.exp()
    assert not open_regions()


def dropping(x: Tensor, region: Region) -> Tensor:
    weight = torch.randn(3, 3)
    with region("outer"):
        y = nn.functional.dropout((x @ weight).tanh(), 0.5).exp()
        with region("inner"):
            return (y * torch.rand(3) + nn.functional.dropout(x, 0.5)).sin()


def batched_gradients(x: Tensor, tangent: Tensor, region: Region) -> Any:
    y = dropping(x, region)
    return torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)


def batched_twice(x: Tensor, tangent: Tensor, region: Region) -> Any:
    y = dropping(x, region)
    options = {"is_grads_batched": True, "create_graph": True}
    (jacobian,) = torch.autograd.grad(y, x, torch.eye(3), **options)
    again = torch.autograd.grad(jacobian, x, torch.randn(4, 3, 3), **options)
    return jacobian, again, torch.autograd.grad(again[0].sum(), x)


def batched_in_batches(x: Tensor, tangent: Tensor, region: Region) -> Any:
    y = dropping(x, region)

    def gradient(weight: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, weight, retain_graph=True)[0]

    return torch.func.vmap(torch.func.vmap(gradient))(torch.randn(2, 4, 3))


def batched_jacobian(x: Tensor, tangent: Tensor, region: Region) -> Any:
    function = functools.partial(dropping, region=region)
    return torch.autograd.functional.jacobian(function, x, vectorize=True)


def batched_hessian(x: Tensor, tangent: Tensor, region: Region) -> Any:
    def function(t: Tensor) -> Tensor:
        return dropping(t, region).sum()

    return torch.autograd.functional.hessian(function, x, vectorize=True)


BATCHED = [
    batched_gradients,
    batched_twice,
    batched_in_batches,
    batched_jacobian,
    batched_hessian,
]
REGIONS = {
    "every time": always,
    "in full": functools.partial(CheckpointScope, verify="full"),
    "kept": functools.partial(CheckpointScope, verify="always", cache=True),
}


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("transform", BATCHED)
def test_a_replay_for_a_batch_of_gradients_draws_what_forward_drew(transform, region):
    assert compare(through(transform), REGIONS[region]) == []
    assert list(leftovers()) == []


def by_autograd(y: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)[0]


def by_vmap(y: Tensor, x: Tensor) -> Tensor:
    pull = functools.partial(torch.autograd.grad, y, x, retain_graph=True)
    return torch.func.vmap(lambda weight: pull(weight)[0])(torch.eye(3))


@pytest.mark.parametrize("jacobian", [by_autograd, by_vmap])
def test_a_function_that_is_run_again_for_a_batch_of_gradients_draws_the_same(jacobian):
    x, weight = torch.randn(3, requires_grad=True), torch.randn(3, 3)

    def function(t: Tensor) -> Tensor:
        return (nn.functional.dropout((t @ weight).tanh(), 0.5) * torch.rand(3)).sin()

    torch.manual_seed(0)
    plain = jacobian(function(x), x)
    torch.manual_seed(0)
    assert torch.equal(jacobian(rerun(function, x), x), plain)

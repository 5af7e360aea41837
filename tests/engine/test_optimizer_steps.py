"""An optimizer step between forward and backward is an error, counted or not."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from recoup import CheckpointScope, checkpoint_module, rerun
from recoup.backend.training.optimizer_steps import STEPS
from recoup.errors import ChangedTensorError, MismatchError
from tests.support.wrapping import begin_fake_group, end_fake_group, mesh_of_two

OPTIMIZERS = [
    pytest.param(functools.partial(torch.optim.Adam, fused=True), id="adam"),
    pytest.param(functools.partial(torch.optim.AdamW, fused=True), id="adamw"),
    pytest.param(functools.partial(torch.optim.SGD, lr=0.1, fused=True), id="sgd"),
    pytest.param(functools.partial(torch.optim.Adagrad, fused=True), id="adagrad"),
]


class Foreign(torch.optim.Optimizer):
    """Writes as the kernels of other libraries do: no version counts it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.detach().numpy()[:] -= 0.1 * parameter.grad.numpy()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh())


def in_scope(net: nn.Module, x: Tensor) -> Tensor:
    with CheckpointScope("net"):
        return net(x)


def in_two_scopes(net: nn.Module, x: Tensor) -> Tensor:
    with CheckpointScope("outer"), CheckpointScope("inner"):
        return net(x)


FORWARDS: list[Callable[[nn.Module, Tensor], Tensor]] = [
    in_scope,
    in_two_scopes,
    rerun,
]


def train(net: nn.Module, optimizer: Any, forward: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        forward(net, torch.randn(3, 4)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("kind", [*OPTIMIZERS, pytest.param(Foreign, id="foreign")])
def test_a_step_between_forward_and_backward_is_an_error_that_names_the_tensor(
    kind, forward
):
    net = network()
    optimizer = kind(net.parameters())
    train(net, optimizer, forward, steps=3)  # verified by now
    later = forward(net, torch.randn(3, 4))
    train(net, optimizer, forward, steps=1)
    with pytest.raises(ChangedTensorError, match=r"tensor of shape \([48]"):
        later.sum().backward()


@pytest.fixture
def nothing_waits() -> Iterator[None]:
    """Set aside what other tests left: errors keep their frames, and these graphs."""
    others = set(STEPS._waiting)
    STEPS._waiting -= others
    yield
    STEPS._waiting |= others


@pytest.mark.usefixtures("nothing_waits")
@pytest.mark.parametrize("forward", FORWARDS)
def test_training_as_usual_is_left_alone(forward):
    net = network()
    versions = [parameter._version for parameter in net.parameters()]
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    train(net, optimizer, forward, steps=3)
    assert [parameter._version for parameter in net.parameters()] == versions


def test_parameters_that_the_step_does_not_change_are_no_error():
    first, second = network(), network()
    optimizer = torch.optim.Adam(
        [*first.parameters(), *second.parameters()], fused=True
    )
    later = in_scope(first, torch.randn(3, 4))
    second(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    later.sum().backward()


def test_a_region_after_the_step_is_no_error():
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    before = in_scope(net, torch.randn(3, 4))
    net(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    after = in_scope(net, torch.randn(3, 4))
    with pytest.raises(ChangedTensorError):
        before.sum().backward()
    after.sum().backward()


def test_a_module_under_a_plan_is_watched_too():
    net = network()
    checkpoint_module(net)
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    train(net, optimizer, lambda net, x: net(x), steps=2)
    later = net(torch.randn(3, 4))
    train(net, optimizer, lambda net, x: net(x), steps=1)
    with pytest.raises(ChangedTensorError):
        later.sum().backward()


@pytest.mark.usefixtures("nothing_waits")
def test_nothing_waits_once_a_graph_is_gone():
    x = torch.randn(4, requires_grad=True)
    y = in_scope(nn.Tanh(), x * 2)
    assert STEPS._waiting
    y.sum().backward()
    assert not STEPS._waiting


class TestData:
    """Writes through `.data`, which no counter and no hook shows."""

    def run(self, verify: Any) -> None:
        weight = torch.randn(4, 4, requires_grad=True)
        for written in (False, False, True):
            with CheckpointScope("data", verify=verify):
                y = (torch.randn(3, 4) @ weight).tanh()
            if written:
                weight.data.mul_(2)
            y.sum().backward()

    def test_they_are_an_error_where_every_replay_is_verified(self):
        with pytest.raises(MismatchError):
            self.run("always")

    def test_they_go_unnoticed_once_a_region_was_verified(self):
        self.run("first")


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_on_a_distributed_tensor_counts_for_the_local_one_that_was_read(kind):
    begin_fake_group()
    try:
        x = torch.linspace(-1, 1, 4, requires_grad=True)
        whole = DTensor.from_local(torch.randn(4), mesh_of_two(), [Shard(0)])
        weight: Any = nn.Parameter(whole)
        weight.grad = torch.ones_like(whole)
        with CheckpointScope("block", verify="off"):
            y = (x * (weight.to_local() * 2)).sin()
        kind([weight], lr=0.1).step()
        with pytest.raises(ChangedTensorError, match="changed in place"):
            y.sum().backward()
    finally:
        end_fake_group()

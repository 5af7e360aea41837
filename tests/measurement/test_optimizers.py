"""What an optimizer's state will take, before it exists, and without touching it."""

# pyright: reportPrivateImportUsage=false

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from recoup.backend.memory.meters import StorageMeter
from recoup.errors import UsageError
from recoup.measurement.steps.optimizers import missing_state_bytes, state_bytes

CPU = torch.device("cpu")


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


class Momentum(torch.optim.Optimizer):
    """An optimizer with attributes of its own, one of which its step writes to."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.share = 0.9
        self.norms = torch.zeros(2)
        self.log: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        del closure
        self.norms.add_(1)
        self.log.append(1)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["mean"] = torch.zeros_like(parameter)
            state["mean"].mul_(self.share).add_(parameter.grad)
            parameter.sub_(state["mean"])


class Looking(Momentum):
    """One that looks at numbers, which tensors without memory do not have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        assert self.param_groups[0]["params"][0].sum().item() < 1e9


class Nested(Momentum):
    """One with its state in containers, and the same tensor in two of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        self.state["everyone"] = {"steps": torch.zeros(3)}  # pyright: ignore[reportArgumentType]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            factors = [torch.eye(side) for side in parameter.shape]
            state["factors"] = {"both": tuple(factors), "last": deque(factors, 1)}


MAKERS = {
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "foreach": lambda p: torch.optim.RMSprop(p, momentum=0.9, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adafactor": torch.optim.Adafactor,
    "own": Momentum,
    "nested": Nested,
    "looking": Looking,
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_first_step_adds_what_was_said_and_nothing_is_touched(name):
    model = layers()
    optimizer = MAKERS[name](model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    said_bytes = missing_state_bytes(optimizer, CPU)
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state
    if isinstance(optimizer, Momentum):
        assert (optimizer.norms.sum(), optimizer.log) == (0, [])
    train(model, optimizer)
    assert state_bytes(optimizer) == said_bytes
    assert missing_state_bytes(optimizer, CPU) == 0


def test_parameters_without_state_count_where_others_have_some():
    model = layers()
    optimizer = torch.optim.Adam(model.parameters())
    model[0](torch.ones(2, 8)).sum().backward()
    optimizer.step()
    before_bytes = state_bytes(optimizer)
    said_bytes = missing_state_bytes(optimizer, CPU)
    train(model, optimizer)
    assert 0 < said_bytes == state_bytes(optimizer) - before_bytes


def test_no_hook_and_no_scheduler_hears_of_it():
    optimizer = torch.optim.SGD(layers().parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    heard: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: heard.append("before")),
        optimizer.register_step_post_hook(lambda *_: heard.append("after")),
        register_optimizer_step_pre_hook(lambda *_: heard.append("before any")),
        register_optimizer_step_post_hook(lambda *_: heard.append("after any")),
    ]
    assert missing_state_bytes(optimizer, CPU) > 0
    for handle in handles:
        handle.remove()
    assert heard == []
    with pytest.warns(UserWarning, match=r"before `optimizer\.step"):
        scheduler.step()


def test_an_optimizer_whose_step_cannot_be_made_says_what_to_do():
    optimizer = torch.optim.LBFGS(layers().parameters())
    with pytest.raises(UsageError, match=r"LBFGS .* leave out optimizer="):
        missing_state_bytes(optimizer, CPU)


def test_after_the_step_that_it_advises_the_state_counts_as_it_is():
    model = layers()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    assert state_bytes(optimizer) == 0

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert missing_state_bytes(optimizer, CPU) == 0
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    # A direction, the gradient before, and the first pair of vectors, in lists.
    assert state_bytes(optimizer) >= 4 * parameter_bytes


# Copies of all parameters, and of the largest one, that a step makes and drops.
STEPS = {
    "foreach": (lambda p: torch.optim.AdamW(p, foreach=True), 1, 0),
    "one by one": (lambda p: torch.optim.AdamW(p, foreach=False), 0, 2),
    "fused": (lambda p: torch.optim.AdamW(p, fused=True), 0, 0),
    "decaying": (
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, foreach=True),
        1,
        0,
    ),
    "two copies": (lambda p: torch.optim.Adadelta(p, foreach=True), 2, 0),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_takes_besides_what_the_guide_says(name):
    make, copies, largest = STEPS[name]
    model = layers()
    optimizer = make(model.parameters())
    train(model, optimizer)
    with StorageMeter() as meter:
        optimizer.step()
    sizes = [p.nbytes for p in model.parameters()]
    said_bytes = copies * sum(sizes) + largest * max(sizes)
    # Besides single numbers, of which an optimizer makes some for each parameter.
    assert said_bytes <= meter.peak_bytes <= said_bytes + 16 * len(sizes)


def test_a_gradient_is_none_of_the_copys_business():
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 7.0)
    missing_state_bytes(torch.optim.Adam([parameter]), CPU)
    assert isinstance(parameter.grad, Tensor)
    assert parameter.grad.tolist() == [7.0] * 3

"""What fit, measure, frontier and the manager run more than once leaves no trace."""

# Torch types what a module holds as Tensor | Module.
# pyright: reportCallIssue=false, reportOptionalMemberAccess=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import copy
import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import recoup
from tests.support.bits import tree_differences


class ActNorm(nn.Module):
    """Initialises itself by the first batch, as in Glow."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(16))
        self.is_initialised = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_initialised:
            with torch.no_grad():
                self.bias.copy_(-x.mean(0))
            self.is_initialised = True
        return x + self.bias


class Stateful(nn.Module):
    """Has state of every kind, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(ActNorm(), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
            for _ in range(4)
        )
        self.hidden = [nn.BatchNorm1d(16)]  # not in the state_dict
        self.calls, self.seen, self.cache = 0, [], {}
        self.total = torch.zeros(16)
        self.history = np.zeros(4)
        self.own = torch.Generator().manual_seed(1)
        self.python, self.numpy = random.Random(2), np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.cache.setdefault("mask", torch.ones(16))
        self.total += x.detach().mean(0)
        self.history[0] += 1
        noise = torch.rand(16, generator=self.own) + self.numpy.random()
        x = x * noise * self.cache["mask"] + self.total + self.python.random()
        for block in self.blocks:
            x = x + block(x)
        return self.hidden[0](x) / (self.calls + self.history[0])


@dataclasses.dataclass(slots=True)
class Trainer:
    model: nn.Module
    critic: nn.Module
    batch: Tensor
    count: int = 0

    def step(self) -> None:
        self.count += 1
        self.loss().backward()

    def loss(self) -> Tensor:
        return self.critic(self.model(self.batch)).square().mean()


def everything(*modules: nn.Module) -> Any:
    """Return a picture of all state that modules have."""
    found: list[Any] = []
    for module in [part for top in modules for part in top.modules()]:
        own = {k: v for k, v in vars(module).items() if not k.startswith("_")}
        for name in ("own", "python", "numpy"):
            own.pop(name, None)
        hidden = own.pop("hidden", [])
        own["history"] = list(own.get("history", []))
        found += [own, dict(module._buffers), dict(module._parameters)]
        found += [[p.grad for p in module.parameters(recurse=False)]]
        found += [everything(*hidden)] if hidden else []
        if isinstance(module, Stateful):
            found += [module.own.get_state(), module.python.getstate()]
            found += [str(module.numpy.bit_generator.state)]
    return copy.deepcopy(found)


def batch() -> Tensor:
    return 3 + 2 * torch.randn(128, 16, generator=torch.Generator().manual_seed(5))


def mean_square(y: Tensor) -> Tensor:
    return y.square().mean()


def critic() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))


CALLS = {
    "fit": lambda m, x: recoup.fit(m, x, 0.9, loss=mean_square),
    "measure": lambda m, x: recoup.measure(m, x, loss=mean_square),
    "frontier": lambda m, x: recoup.frontier(m, x, loss=mean_square, points=2),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_model_is_as_it_was(call):
    torch.manual_seed(0)
    model = Stateful()
    before = everything(model)
    CALLS[call](model, batch())
    differences = list(tree_differences(before, everything(model), where=""))
    assert differences == []


def test_a_model_is_as_it_was_after_a_dry_measurement():
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 16)
            self.calls, self.seen, self.last = 0, [], {"input": torch.ones(1)}

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
            self.calls += 1
            self.seen.append(input)
            self.last["input"] = input
            return super().forward(input)

    model = nn.Sequential(Counting(), Counting())
    before = everything(model)
    recoup.measure(model, batch(), loss=mean_square, dry=True)
    assert list(tree_differences(before, everything(model), where="")) == []


@pytest.mark.parametrize("how", ["plain", "fit", "manager"])
def test_the_first_step_is_that_of_the_plain_twin(how):
    torch.manual_seed(0)
    model, x = Stateful(), batch()
    twin = copy.deepcopy(model)
    twin.own.set_state(model.own.get_state())
    if how == "fit":
        recoup.fit(model, x, 0.8, loss=mean_square)
    states = torch.get_rng_state()
    mean_square(twin(x)).backward()
    torch.set_rng_state(states)
    if how == "manager":
        with recoup.CheckpointManager(max_memory_mb=4, auto_checkpoint=True):
            loss = mean_square(model(x))
        loss.backward()
    else:
        mean_square(model(x)).backward()
    found = list(tree_differences(everything(twin), everything(model), where=""))
    assert found == []


MODEL: Any = None
HEAD: Any = None
HEADS: list[nn.Module] = []


def in_a_generator_expression() -> None:
    sum(head(MODEL(batch())).square().mean() for head in HEADS).backward()


def in_an_inner_function() -> None:
    def loss() -> Tensor:
        return HEAD(MODEL(batch())).square().mean()

    loss().backward()


def in_a_slot() -> None:
    TRAINER.step()


TRAINER: Any = None


@pytest.mark.parametrize(
    "step", [in_a_generator_expression, in_an_inner_function, in_a_slot]
)
def test_heads_that_a_step_reaches_are_as_they_were(step, monkeypatch):
    torch.manual_seed(0)
    model, head = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), critic()
    trainer = Trainer(model, head, batch())
    for name, value in {
        "MODEL": model,
        "HEAD": head,
        "HEADS": [head],
        "TRAINER": trainer,
    }.items():
        monkeypatch.setitem(globals(), name, value)
    before = everything(model, head)
    _, report = recoup.fit(model, step=step, budget=1.0)
    report.remove()
    assert list(tree_differences(before, everything(model, head), where="")) == []
    # The object of a method counts as a part of the step.
    recoup.fit(model, step=trainer.step, budget=1.0)
    assert trainer.count == 0


def test_momentum_that_hooks_keep_is_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    momentum = {p: torch.zeros_like(p) for p in model.parameters()}

    def update(p: Tensor) -> None:
        with torch.no_grad():
            momentum[p].mul_(0.9).add_(p.grad)
            p.sub_(momentum[p], alpha=0.01)
        p.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    before = everything(model)
    recoup.fit(model, batch(), 1.0, loss=mean_square)
    assert list(tree_differences(before, everything(model), where="")) == []
    assert all((m == 0).all() for m in momentum.values())


def test_flags_and_requires_grad_that_a_step_changes_are_as_they_were():
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(), nn.Linear(16, 1))

    def step() -> None:
        model[1].eval()
        model(batch()).mean().backward()
        model[0].requires_grad_(False)

    recoup.measure(model, step=step)
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())

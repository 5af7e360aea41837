"""Fits that are interrupted in recoup's own code, and what must hold afterwards."""

import sys
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from recoup.engine.recording.active import open_regions
from recoup.engine.recording.observers import observers
from recoup.engine.replay.recomputing import is_recomputing
from recoup.errors import InfeasibleError
from recoup.fitting.fit import fit
from tests.support.twin import leftovers


class Net(nn.Module):
    """Blocks with everything that a fit must put back."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 8))
            for _ in range(3)
        )
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            x = torch.tanh(block(x))
        return nn.functional.dropout(x)


class Fitting:
    """One model, to be fitted again and again.

    Args:
        budget: The share of the plain peak; too small a one cannot be met.
    """

    def __init__(self, budget: float) -> None:
        torch.manual_seed(0)
        self.budget = budget
        self._report: Any = None
        self.model, self.x = Net(), torch.randn(64, 8)
        self.model.blocks[1].eval()
        self.model(self.x).sum().backward()
        self._gradients = [p.grad for p in self.model.parameters()]
        self._contents = [g.clone() for g in self._gradients if g is not None]
        self._state = {k: v.clone() for k, v in self.model.state_dict().items()}
        self._generator = torch.get_rng_state()
        self._attached = attached_to(self.model)
        self._step = self.plain_step()
        self()
        self.remove()
        self._hooks = global_hooks()  # of the library, once in a process

    def __call__(self) -> None:
        """Fit the model, or be refused if the budget is too small."""
        self.remove()
        with suppress(InfeasibleError):
            _, self._report = fit(self.model, self.x, self.budget, loss=torch.sum)

    def remove(self) -> None:
        """Take the plan of a fit that was not interrupted off again."""
        if self._report is not None:
            self._report.remove()
            self._report = None

    def plain_step(self) -> list[Tensor]:
        """Return the gradients of one step; leave everything as it was."""
        loss = self.model(self.x).sum()
        found = torch.autograd.grad(loss, list(self.model.parameters()))
        self.model.load_state_dict(self._state)
        self.model.calls -= 1
        torch.set_rng_state(self._generator)
        return list(found)

    def faults(self) -> list[str]:
        """List what is not as it was before a fit that was interrupted."""
        self.remove()
        found = [*leftovers()]
        if open_regions():
            found.append("a region is open")
        if observers():
            found.append("an observer is left")
        if is_recomputing():
            found.append("a replay seems to run")
        if global_hooks() != self._hooks:
            found.append(f"hooks of torch: {global_hooks()}")
        attached = attached_to(self.model)
        if attached != self._attached:
            found.append(f"attached: {attached ^ self._attached}")
        if not torch.equal(torch.get_rng_state(), self._generator):
            found.append("the generator has moved")
        if self.model.calls != 1:
            found.append(f"counted {self.model.calls} calls")
        state = self.model.state_dict()
        if not all(torch.equal(self._state[name], state[name]) for name in state):
            found.append("buffers or parameters have changed")
        gradients = [p.grad for p in self.model.parameters()]
        if any(
            now is not then
            for now, then in zip(gradients, self._gradients, strict=True)
        ):
            found.append("other gradients")
        elif not all(
            now is not None and torch.equal(then, now)
            for then, now in zip(self._contents, gradients, strict=True)
        ):
            found.append("gradients have changed")
        if not found and not all(map(torch.equal, self.plain_step(), self._step)):
            found.append("a plain step gives other gradients")
        return found


def attached_to(model: nn.Module) -> set[str]:
    """Name the attributes, hooks and flags of a model's modules."""
    found: list[str] = []
    for path, module in model.named_modules():
        found += [f"{path}.{name}" for name in vars(module)]
        found += [
            f"{path}.{name}: {len(each)}"
            for name, each in vars(module).items()
            if name.endswith("hooks")
        ]
        found.append(f"{path}: {module.training} {type(module).__name__}")
    return set(found)


def global_hooks() -> list[int]:
    """Count the hooks that torch keeps for all modules and all optimizers."""
    modules: Any = nn.modules.module
    of_modules = [
        len(each)
        for name, each in vars(modules).items()
        if name.startswith("_global_") and isinstance(each, dict)
    ]
    of_optimizers = [
        len(each)
        for name, each in vars(sys.modules["torch.optim.optimizer"]).items()
        if name.startswith("_global_") and isinstance(each, dict)
    ]
    return [*of_modules, *of_optimizers]

"""Fits that are interrupted in recoup's own code, and what must hold afterwards.

`python -m tests.support.interrupted_fits` interrupts at every line of recoup that a fit
reaches, the first and the last time, in several processes.
"""

import argparse
import functools
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recoup.engine.recording.active import open_regions
from recoup.engine.recording.observers import observers
from recoup.engine.replay.recomputing import is_recomputing
from recoup.errors import InfeasibleError
from recoup.fitting.fit import fit
from tests.support.interrupts import LineInterrupter, places_reached
from tests.support.shards import Tally, run_in_shards
from tests.support.twin import leftovers
from tests.support.work import OURS


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


BUDGETS = {"met": 0.8, "infeasible": 0.05}
"""The shares of the plain peak that fits are interrupted at."""


@dataclass(frozen=True, slots=True)
class InterruptedFit:
    """One fit to be interrupted.

    Attributes:
        budget: The name of its budget.
        file: The file, from recoup's folder.
        line: The line that it is interrupted at.
        time: Which time that it is reached.
    """

    budget: str
    file: str
    line: int
    time: int

    def __str__(self) -> str:
        return f"{self.budget} {self.file}:{self.line}, time {self.time}"


def fits_to_interrupt(files: str = "") -> list[InterruptedFit]:
    """List the fits at every line that one reaches, the first and the last time.

    Args:
        files: What the paths of the files match, if not all count.
    """
    found: dict[InterruptedFit, None] = {}
    for name, budget in BUDGETS.items():
        fitting = Fitting(budget)
        for last in (False, True):
            for (file, line), count in places_reached(fitting, files=files, last=last):
                below = str(Path(file).relative_to(OURS))
                found[InterruptedFit(name, below, line, count)] = None
        fitting.remove()
    return list(found)


_TRIES = 4
"""So often a fit is run again whose course, which times decide, missed the line."""

_FITS_BETWEEN = 40
"""After so many that were interrupted one comes to its end."""


def interrupt_fits(cases: Iterator[InterruptedFit], tally: Tally) -> None:
    """Interrupt fits one by one; stop after one that left something behind."""
    sys.unraisablehook = lambda _: None  # an interrupt in a destructor is ignored
    torch.set_num_threads(1)
    gc.disable()  # as in tests: what only the collector would free is a leak
    fittings = {name: Fitting(budget) for name, budget in BUDGETS.items()}
    for number, case in enumerate(cases):
        fitting = fittings[case.budget]
        was_reached = any(_interrupt(fitting, case) for _ in range(_TRIES))
        faults = fitting.faults()
        if not faults and number % _FITS_BETWEEN == 0:
            fitting()
            faults = [f"after another fit: {fault}" for fault in fitting.faults()]
        if faults:
            tally.kinds["wrong"] += 1
            tally.failures[case] = f"{case}: {'; '.join(faults)}"
            return
        tally.kinds["whole" if was_reached else "not reached"] += 1


def _interrupt(fitting: Fitting, case: InterruptedFit) -> bool:
    place = str(Path(OURS) / case.file), case.line
    return LineInterrupter(place, time=case.time).run(fitting)


def interrupt_all(
    processes: int,
    *,
    seconds: float,
    files: str = "",
    every: int = 1,
    report: Callable[[str], None] = lambda _: None,
) -> Tally:
    """Interrupt fits at every line, the first and the last time; return the outcome.

    Args:
        processes: How many run at a time.
        seconds: No fit begins later than that.
        files: What the paths of the files match, if not all count.
        every: Take every n-th.
        report: Called with each failure as it is found, and each minute with a tally.
    """
    cases = fits_to_interrupt(files)[::every]
    random.Random(0).shuffle(cases)  # the later its line, the longer a fit takes
    report(f"{len(cases)} fits to interrupt")
    tally = run_in_shards(
        interrupt_fits, cases, processes, seconds=seconds, report=report
    )
    left = len(cases) - tally.kinds.total()
    if left:
        tally.failures["time"] = f"{left} not begun in {seconds:.0f} s"
    return tally


def main() -> None:
    """Interrupt fits as the command line asks; fail if one of them does."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=3600, help="in seconds")
    parser.add_argument("--files", default="", help="a pattern of their paths")
    parser.add_argument("--every", type=int, default=1, help="take every n-th")
    options = parser.parse_args()
    start = time.time()
    report = functools.partial(print, flush=True)
    tally = interrupt_all(
        options.processes,
        seconds=options.limit,
        files=options.files,
        every=options.every,
        report=report,
    )
    report(f"{time.time() - start:.0f} s, {tally}")
    for text in tally.failures.values():
        report(text)
    sys.exit(1 if tally.failures else 0)


if __name__ == "__main__":
    # By its name: what the processes send is of the classes there.
    from tests.support.interrupted_fits import main as run

    run()

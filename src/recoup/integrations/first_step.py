"""Fit a model on the first step that a framework runs, in all of its processes."""

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from recoup.backend.compiler.recognition import uncompiled
from recoup.core.segments import Action
from recoup.errors import UnsupportedError
from recoup.fitting.arguments import actions_of
from recoup.fitting.budgets import Budget, budget_or_environment
from recoup.fitting.compiled_fit import CompiledFit
from recoup.fitting.fit import Compile, Fit, check_compile
from recoup.train.budgeting.process_budget import fit_together
from recoup.train.budgeting.sharded_units import UnitPlan
from recoup.train.processes import Processes, unwrapped

_log = logging.getLogger(__name__)


class FirstStep:
    """A plan for a budget that is found on a framework's own step, then applied.

    Args:
        budget: As for `recoup.fit`; None reads the environment variable
            `RECOUP_BUDGET`. Several processes need bytes, not a share.
        compile: As for `recoup.fit`; one process only.
        allow: As for `recoup.fit`.

    Attributes:
        report: What `recoup.fit` did; None before the first step.

    Raises:
        UsageError: An argument is out of range.
    """

    def __init__(
        self,
        budget: Budget,
        compile: Compile,  # noqa: A002 (torch's own word)
        allow: Iterable[Action | str],
    ) -> None:
        self.budget = budget_or_environment(budget)
        self.compile: Compile = compile
        self.allow = actions_of(map(Action, allow))
        check_compile(compile, self.allow)
        self.report: Fit | CompiledFit | UnitPlan | None = None

    def fit(
        self,
        model: nn.Module,
        run: Callable[[nn.Module], object],
        *,
        optimizer: Optimizer | None,
        accumulate: bool,
    ) -> Fit | CompiledFit | UnitPlan:
        """Fit the model into the budget; all processes must call it together.

        Args:
            model: The model as the framework calls it, in its wrappers.
            run: Runs forward and backward once with the model that it is given.
            optimizer: Room is left for its state.
            accumulate: Gradients of earlier batches are there when a step begins.

        Raises:
            InfeasibleError: No plan fits.
            UnsupportedError: The model is replicated over devices in one process.
        """
        self.remove()
        called = eager(model)
        if isinstance(called, DataParallel):
            raise UnsupportedError(
                "expected one device for each process, got DataParallel; start one "
                "process for each GPU, with torchrun or accelerate launch."
            )
        processes = Processes(called)
        processes.connect()

        def rehearse() -> None:
            with _unsynchronised(called):
                run(called)

        self.report = fit_together(
            unwrapped(called),
            rehearse,
            self.budget,
            optimizer=optimizer,
            processes=processes,
            accumulate=accumulate,
            allow=self.allow,
            compile=self.compile,
        )
        _log.info("%s", self.report)
        return self.report

    def remove(self) -> None:
        """Take the plan off the model; `report` can still be read."""
        if self.report is not None:
            self.report.remove()

    def numbers(self) -> dict[str, float]:
        """Return what a log should say: bytes and seconds by name."""
        report = self.report
        if report is None:
            return {}
        names = ["budget_bytes", "measured_peak_bytes"]
        if not isinstance(report, UnitPlan):
            names += ["plain_peak_bytes", "plain_seconds", "measured_seconds"]
        return {f"recoup_{name}": getattr(report, name) for name in names}


def eager(model: nn.Module) -> nn.Module:
    """Return the model as it was before `torch.compile` wrapped it."""
    found: Any = uncompiled(model)
    return found if isinstance(found, nn.Module) else model


def _unsynchronised(model: nn.Module) -> AbstractContextManager[Any]:
    """Exchange no gradients: processes measure different numbers of steps."""
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return nullcontext()

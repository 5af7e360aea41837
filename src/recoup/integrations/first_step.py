"""Fit a model on the first step of a framework, in all of its processes."""

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from recoup.backend.compiler.recognition import eager, is_compiled
from recoup.backend.state.trees import map_leaves
from recoup.backend.training.optimizer_steps import inner_optimizer
from recoup.core.segments import Action
from recoup.core.units import parse_budget
from recoup.errors import InfeasibleError, UnsupportedError, UsageError
from recoup.fitting.arguments import actions_of
from recoup.fitting.budgets import Budget, budget_or_environment
from recoup.fitting.compiled_fit import CompiledFit
from recoup.fitting.fit import Compile, Fit, check_compile
from recoup.fitting.largest_batch import (
    LargestBatch,
    check_slowdown,
    largest_batch,
)
from recoup.measurement.steps.training_step import loss_function
from recoup.train.budgeting.process_budget import UnitPlan, fit_together
from recoup.train.data.batches import batch_size
from recoup.train.processes import Processes, unwrapped

_log = logging.getLogger(__name__)


class FirstStep:
    """A plan for a budget, found on a framework's own step and applied.

    Args:
        budget: As for `recoup.fit`; None reads the environment variable
            `RECOUP_BUDGET`. Several processes need bytes, not a share.
        compile: As for `recoup.fit`; one process only.
        allow: As for `recoup.fit`.
        slowdown: The accepted slowdown relative to the plain step; None: any, and the
            largest batch is searched only if required.
        rerun: As for `recoup.fit`.

    Attributes:
        report: The report of `recoup.fit`; None before the first step.
        largest: The largest batch, if it was searched.

    Raises:
        UsageError: An argument is out of range.
    """

    def __init__(
        self,
        budget: Budget,
        compile: Compile,  # noqa: A002 (torch's own word)
        allow: Iterable[Action | str],
        slowdown: float | None = None,
        *,
        rerun: bool | None = None,
    ) -> None:
        self.budget = budget_or_environment(budget)
        self.compile: Compile = compile
        self.allow = actions_of(map(Action, allow))
        check_compile(compile)
        check_slowdown(slowdown)
        if slowdown is not None and isinstance(parse_budget(self.budget or 0), float):
            raise UsageError(
                "expected a budget in bytes with slowdown=, got a share; the plain "
                "peak that it is a share of grows with the batch."
            )
        self.slowdown = slowdown
        self.rerun = rerun
        self.largest: LargestBatch | None = None
        self.report: Fit | CompiledFit | UnitPlan | None = None

    @property
    def settings(self) -> tuple[object, ...]:
        """The arguments of a plan, besides the step."""
        return (self.budget, self.compile, self.allow, self.rerun)

    def begin(self) -> None:
        """Remove the plan of an earlier training, and its report."""
        self.remove()
        self.report = None

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
            run: Runs forward and backward once with the given model.
            optimizer: Memory is reserved for its state.
            accumulate: Whether gradients of earlier batches exist when a step begins.

        Raises:
            InfeasibleError: No plan fits.
            UnsupportedError: The model is replicated over devices in one process.
        """
        self.begin()
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

        try:
            self.report = fit_together(
                self._fitted(model),
                rehearse,
                self.budget,
                optimizer=inner_optimizer(optimizer) if optimizer else None,
                processes=processes,
                accumulate=accumulate,
                allow=self.allow,
                compile=self.compile,
                rerun=self.rerun,
            )
        except InfeasibleError as error:
            if self.largest is not None:
                error.add_note(f"The largest batch that fits is {self.largest.size}.")
            raise
        _log.info("%s", self.report)
        return self.report

    def find_largest(
        self,
        model: nn.Module,
        run: Callable[[nn.Module, Any], object],
        batch: Any,
        *,
        optimizer: Optimizer | None,
        accumulate: bool,
        limit: int = 1 << 16,
    ) -> LargestBatch:
        """Find the largest batch within the budget, by repeating given samples.

        Args:
            model: The model as the framework calls it, in its wrappers.
            run: Runs forward and backward with a model and a batch.
            batch: A batch; larger ones repeat its samples.
            optimizer: Memory is reserved for its state.
            accumulate: Whether gradients of earlier batches exist when a step begins.
            limit: The maximum size to try.

        Raises:
            InfeasibleError: Not even one sample fits.
            UnsupportedError: There are several processes.
        """
        called = eager(model)
        if Processes(called).count > 1:
            raise UnsupportedError(
                "expected one process to look for the largest batch, got several; run "
                "recoup.largest_batch in one process and set the batch size."
            )
        self.remove()
        self.largest = largest_batch(
            self._fitted(model),
            lambda size: of_size(batch, size),
            self.budget,
            step=lambda given: run(called, given),
            slowdown=self.slowdown,
            optimizer=optimizer,
            accumulate=accumulate,
            allow=self.allow,
            limit=limit,
            compile=self.compile,
        )
        _log.info("%s", self.largest)
        return self.largest

    def _fitted(self, model: nn.Module) -> nn.Module:
        """Return what to fit of a model that the framework calls.

        For a compiled model `fit` suspends the compiler anywhere in it.
        """
        called = eager(model)
        is_suspended = self.compile and model is not called
        return model if is_suspended else unwrapped(called)

    def check_compiled(self, model: Any) -> None:
        """Refuse a compiled model or step, unless recoup is to compile the blocks.

        Raises:
            UnsupportedError: It hides the values that the model keeps.
        """
        if not self.compile and is_compiled(model):
            raise UnsupportedError(
                "expected a model that is not compiled, got one by torch.compile, "
                'which hides its operators; give compile="inductor" or "exact" to '
                "recoup, which then compiles the blocks instead."
            )

    def remove(self) -> None:
        """Remove the plan from the model; `report` stays available."""
        if self.report is not None:
            self.report.remove()

    def numbers(self) -> dict[str, float]:
        """Return the figures to log: bytes and seconds by name."""
        report = self.report
        if report is None:
            return {}
        names = ["budget_bytes", "measured_peak_bytes"]
        if not isinstance(report, UnitPlan):
            names += ["plain_peak_bytes", "plain_seconds", "measured_seconds"]
        found = {f"recoup_{name}": getattr(report, name) for name in names}
        if self.largest is not None:
            found["recoup_largest_batch"] = self.largest.size
        return found


_FITTED: WeakKeyDictionary[nn.Module, FirstStep] = WeakKeyDictionary()


def fit_loop(  # noqa: PLR0913 (as `fit`)
    backward: Callable[[Tensor], object],
    model: nn.Module,
    batch: Any,
    first: FirstStep,
    *,
    inner: nn.Module,
    loss: Callable[..., Tensor] | None,
    optimizer: Optimizer | None,
    accumulate: bool,
) -> Fit | CompiledFit | UnitPlan:
    """Fit the model of a loop unless it is fitted; return the first step.

    Another budget, compiler or set of actions fits it again.

    Args:
        backward: Runs backward from a loss.
        model: The model as the loop calls it.
        batch: As for `recoup.fit`.
        first: The plan to be found.
        inner: The model in torch's own wrappers only.
        loss: As for `recoup.fit`.
        optimizer: Memory is reserved for its state.
        accumulate: Whether gradients of earlier batches exist when a step begins.

    Raises:
        InfeasibleError: No plan fits.
        UnsupportedError: The model was compiled, and `compile=` is not given.
        UsageError: The arguments do not describe a step.
    """
    known = _FITTED.get(inner)
    if known is not None and known.report is not None:
        if known.settings == first.settings:
            return known.report
        known.remove()
    first.check_compiled(model)
    loss_of_a_call = loss_function(model, batch, loss)

    def run(_: nn.Module) -> None:
        # A loop has a variable for its loss, which keeps the graph through backward.
        loss = loss_of_a_call()
        backward(loss)

    report = first.fit(inner, run, optimizer=optimizer, accumulate=accumulate)
    _FITTED[inner] = first
    return report


def of_size(batch: Any, size: int) -> Any:
    """Return a batch of a given size, by repeating the samples of another.

    Examples:
        >>> import torch
        >>> of_size((torch.tensor([1, 2]), 0.5), 3)
        (tensor([1, 2, 1]), 0.5)
    """
    count = batch_size(batch)

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != count:
            return leaf
        return leaf[torch.arange(size, device=leaf.device) % count]

    return map_leaves(resized, batch)


def _unsynchronised(model: nn.Module) -> AbstractContextManager[Any]:
    """Do not exchange gradients: processes measure different numbers of steps."""
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return nullcontext()

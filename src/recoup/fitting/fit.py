"""fit: apply and check the fastest plan within a memory budget."""

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recoup.backend.compiler.partitioning import Executor
from recoup.backend.compiler.recognition import is_compiled
from recoup.backend.compiler.suspension import suspended_compilation
from recoup.backend.memory.meters import is_out_of_memory
from recoup.backend.state.model_state import evaluation_advice
from recoup.backend.state.snapshots import StepSnapshot
from recoup.backend.training.sharded_units import has_units_inside
from recoup.core.callers import user_stacklevel
from recoup.core.plan import Plan
from recoup.core.segments import Action
from recoup.core.units import print_bytes, print_seconds
from recoup.engine.applied.applied_plan import plans_in, remove_plans
from recoup.engine.verification.replay_check import Verify, check_verify
from recoup.errors import (
    BudgetWarning,
    InfeasibleError,
    UsageError,
)
from recoup.fitting.arguments import actions_of, one_model, optimizers_of
from recoup.fitting.block_search import PlainStep
from recoup.fitting.budgets import Budget, budget_for_floor, check_budget
from recoup.fitting.closed_loop import ClosedLoop, Settled
from recoup.fitting.collected_findings import (
    fit_findings,
    frontier_and_rules,
    graph_findings,
)
from recoup.fitting.compiled_fit import CompiledFit, fit_compiled, fit_with_regions
from recoup.fitting.fit_result import FitResult, fastest
from recoup.fitting.following.adaptation import Adapted
from recoup.fitting.following.optimizer_memory import (
    forget_optimizers,
    watch_optimizers,
)
from recoup.fitting.progress import Progress, progress_for
from recoup.measurement.steps.training_step import (
    TrainingStep,
    device_of,
    training_step,
    untouched,
)
from recoup.planners.infeasible import in_units_of
from recoup.planners.planner import EXACT, floor_with
from recoup.planners.search import Search
from recoup.report.findings import Findings
from recoup.report.pages import page
from recoup.report.texts import slower_words

Compile = Literal[False, "exact", "inductor", "auto"]
"""The executor of the blocks; see `fit`."""

Model = TypeVar("Model", bound=nn.Module | Sequence[nn.Module])

_CHANGED = (
    "recoup did not run the step again: it had already added to gradients that were "
    "there before it, or zeroed them in place. Drop them (zero_grad(set_to_none=True)) "
    "and begin with the first batch of the sum."
)
_SMALLEST = (
    "recoup did not run the step again: it knows no plan that takes a tenth less than "
    "the active one. Give a smaller batch, or move more off the device."
)
_RAN_TWICE = (
    "recoup had planned for a tenth less memory and run the step again: this is how "
    "the second run ended. Running it once more plans for yet a tenth less."
)

_RUNS = 10
"""The number of step runs if the first plan fits, for the progress callback."""


@dataclass(repr=False, kw_only=True)
class Fit(FitResult):
    """The result of `fit`: the plan applied to a model, and its costs.

    Attributes:
        plan: The plan.
        planned_seconds: The predicted time before any step ran with the plan.
        gap: The optimality gap: an upper bound on the share of the step's time that
            another plan could save.
        planner: The algorithm that found the plan.
        planning_seconds: The planning time.
        retries: The number of steps that ran out of memory and were repeated.
        tightenings: The number of times a new plan for less memory was made. Since then
            peak and time are predictions: the measurements are of the earlier plan.
        verify: When recomputed values are compared with forward's.
        search: All plans that were found for the step.
    """

    plan: Plan
    planned_seconds: float
    gap: float
    planner: str
    planning_seconds: float
    retries: int = 0
    tightenings: int = 0
    verify: Verify = "first"
    _adapted: Adapted | None = field(default=None, repr=False)
    search: Search | None = field(default=None, repr=False, compare=False)

    @cached_property
    def floor_bytes(self) -> int:
        """The predicted smallest feasible budget, computed at first access.

        On an accelerator with a margin; see `budget_for_floor`.
        """
        search = self.search or Search(self.graph, EXACT)
        needed_bytes = search.floor_bytes + self.reserved_bytes
        return budget_for_floor(needed_bytes, device_of(self.model))

    def remove(self) -> nn.Module:
        """Remove the plan from the model, restoring its state before `fit`."""
        if self._adapted is not None:
            self._adapted.remove()
            self._adapted = None
            forget_optimizers(self.model)
        return self.model

    def tighten(self) -> bool:
        """Plan again for a tenth less memory; return whether that was possible.

        A tenth less than the budget, and than the last plan's predicted peak.
        """
        if self._adapted is None or not self._adapted.tighten():
            return False
        plan = self.plan = self._adapted.plan
        self.budget_bytes = plan.budget_bytes + self.reserved_bytes
        self.predicted_peak_bytes = plan.peak_bytes + self.reserved_bytes
        self.predicted_seconds = self.planned_seconds = plan.seconds
        self.tightenings += 1
        return True

    def adopt(self, plan: Plan) -> None:
        """Apply another plan for the same step, such as another process's.

        Raises:
            UsageError: The plan has been removed from the model.
        """
        if self._adapted is None:
            raise UsageError("the plan was removed from the model: call fit again.")
        self._adapted.adopt(plan)
        self.plan = plan

    def run(self, step: Callable[[], Any]) -> Any:
        """Run a step; if it runs out of memory, plan for less and run it again.

        Before the retry, gradients, buffers and random generators of the model, and of
        everything else that the step refers to, are restored, so that the result is the
        same. The step is not retried if it had already added to existing gradients, as
        the second of several accumulated batches does. Costs one copy of the buffers.

        Args:
            step: Function that runs forward and backward, and anything else that may be
                repeated.

        Raises:
            Exception: The step's error, if it is not out of memory or cannot be
                retried.
        """
        device = device_of(self.model)
        before = StepSnapshot(step, self.model, devices=[device])
        try:
            return step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if not before.restore():
                error.add_note(_CHANGED)
                raise
            if not self.tighten():
                error.add_note(_SMALLEST)
                raise
        self.retries += 1
        if device.type != "cpu":
            torch.accelerator.empty_cache()
        try:
            return step()
        except Exception as error:
            if is_out_of_memory(error):
                error.add_note(_RAN_TWICE)
            raise

    def numbers(self) -> dict[str, Any]:
        """Return the costs as plain data, for other programs."""
        return {
            **super().numbers(),
            "planner": self.planner,
            "planning_seconds": self.planning_seconds,
            "regions": self.plan.regions,
            "held": self.plan.count(),
        }

    def findings(self, *, title: str = "", points: int = 7) -> Findings:
        """Return the findings for `recoup.report`; see `fit_findings`."""
        return fit_findings(self, title=title, points=points)

    def __repr__(self) -> str:
        slower = slower_words(self.predicted_seconds, self.plain_seconds)
        how, peak_bytes = "measured", self.measured_peak_bytes
        if self.tightenings:
            how, peak_bytes = "predicted", self.predicted_peak_bytes
        return (
            f"{self._memory(peak_bytes, how)}\n"
            f"  step {print_seconds(self.measured_seconds)} measured, {slower} "
            f"predicted, at most {self.gap:.1%} above the optimum\n"
            f"  {self._actions()}; fitted in {print_seconds(self.total_seconds)}\n"
            "  .write_page(path), .plan, .remove()"
        )

    def __str__(self) -> str:
        slower = self.predicted_seconds / self.plain_seconds - 1
        predicted = print_bytes(self.predicted_peak_bytes)
        plain = print_bytes(self.plain_peak_bytes)
        budget = f"budget {print_bytes(self.budget_bytes)}"
        if self.tightenings:
            return (
                f"{budget}, after it was planned {self.tightenings} times for less: "
                f"predicted peak {predicted} (plain {plain}); step {slower:+.1%} by "
                f"prediction; {self._actions()}"
            )
        return (
            f"{budget}: measured peak {print_bytes(self.measured_peak_bytes)} "
            f"(predicted {predicted}, plain {plain}); step "
            f"{print_seconds(self.measured_seconds)}, {slower:+.1%} by prediction; "
            f"{self._actions()}, optimality gap at most {self.gap:.1%}"
            f"{self._compared()}"
        )

    def _actions(self) -> str:
        if not self.plan.regions:
            return "nothing is recomputed"
        repeated = self.plan.repeated_calls
        if repeated == self.plan.regions:
            return f"{repeated} blocks are called again in backward"
        held = self.plan.count()
        actions = ", ".join(f"{count} {action}" for action, count in held.items())
        return f"{self.plan.regions} regions ({actions or 'all recomputed'})"


class _Options(TypedDict, total=False):
    """The arguments of `fit` that have the same type with every executor."""

    loss: Callable[..., Tensor] | None
    step: Callable[[], object] | None
    optimizer: Optimizer | Sequence[Optimizer] | None
    accumulate: bool
    allow: Iterable[Action]
    blocks: Sequence[str] | None
    device: torch.device | str | None
    progress: Progress | bool | None
    verify: Verify
    rerun: bool | None


@overload
def fit(
    model: Model,
    batch: Any = None,
    budget: Budget = None,
    *,
    compile: Literal[False] = False,
    **options: Unpack[_Options],
) -> tuple[Model, Fit]: ...


@overload
def fit(
    model: Model,
    batch: Any = None,
    budget: Budget = None,
    *,
    compile: Literal["exact", "inductor", "auto"],
    **options: Unpack[_Options],
) -> tuple[Model, Fit | CompiledFit]: ...


def fit(  # noqa: PLR0913 (a step can be described in several ways)
    model: Model,
    batch: Any = None,
    budget: Budget = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    step: Callable[[], object] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    accumulate: bool = False,
    allow: Iterable[Action] = (Action.KEEP,),
    blocks: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    progress: Progress | bool | None = None,
    verify: Verify = "first",
    rerun: bool | None = None,
    compile: Compile = False,  # noqa: A002 (torch's own word)
) -> tuple[Model, Fit | CompiledFit]:
    """Make a model train within a memory budget, as fast as possible.

    Measures one step with every block recomputed, finds the fastest plan that fits,
    applies it to the model, and checks it on a real step; if the measurement differs
    from the prediction, the plan is corrected. Parameters, buffers, gradients and
    random generators are restored. Train with any loop; gradients are bitwise those of
    the plain model.

    Costs ten steps on a CPU, seven on an accelerator, and the planning; two more steps
    for each correction, and up to twenty if an accelerator's step is CPU-bound. Steps
    with the returned plan stay within the budget, including the one that verifies it
    (on a CPU up to 2 % of the largest tensor above it). A plan that is tried and
    rejected may exceed it; on an accelerator, one that calls blocks again is tried up
    to 1 % above it. The measured step needs the memory of recomputing every block,
    which may be more than the smallest plan. On a CPU with enough free memory the plain
    step is timed twice; with `compile=` it is timed on any device that has the memory.

    Args:
        model: The model, which stays the same object with the same parameters. Or
            several that share one budget, as a list, or as a module that contains the
            models that `step` calls and is not called itself.
        batch: Its arguments: a tensor, a tuple of positional arguments, or a mapping of
            keyword arguments. With a loss that takes the output and a target: a pair of
            the model's arguments and the target.
        budget: The most bytes on the device at any moment of forward and backward,
            everything included: a number, a text such as "8GiB", a share of the plain
            peak (a float up to 1, or a text such as "60%"), or None for the device's
            free memory.
        loss: Function from the output (and the target) to the loss. Without it the
            output must be the loss, or have it as `loss`.
        step: Function that runs forward and backward, instead of `batch` and `loss`. It
            may have several backward passes, as for gradient accumulation or a GAN.
        optimizer: One or several optimizers, for whose missing state memory is
            reserved. Temporaries of its `step` are not counted: with `foreach=True`,
            torch's default on accelerators, up to about two copies of the parameters,
            at a time when the activations are freed; with `fused=True` none, with
            `foreach=False` a few copies of the largest parameter.
        accumulate: Whether gradients of earlier steps exist when a step begins, as when
            the step is one micro-batch of gradient accumulation, or gradients are
            zeroed in place. They count from the start.
        allow: Actions allowed on a value besides recomputing it.
        blocks: The paths of the modules between which the model is cut; by default
            they are found automatically.
        device: The device whose memory is counted; by default that of the parameters.
        progress: Progress callback with the current activity and the estimated
            remaining time; True shows it, None shows it in a terminal.
        verify: When replayed values are compared with forward's; see `CheckpointScope`.
        rerun: Whether blocks may be recomputed by calling them again, if that is faster
            than recording their operators and a call showed no side effects. None: only
            if an accelerator's step is CPU-bound, as measured. True: anywhere. False:
            no code of the model runs twice. See the guide to `fit`.
        compile: The executor of the blocks. False: eager torch, and recoup recomputes
            operators; gradients are bitwise those of the plain model. "exact": blocks
            are captured by torch.compile, partitioned by recoup's plan and run with
            eager kernels; gradients are bitwise those of the plain model wherever its
            kernels are deterministic. "inductor": the same partitions, compiled;
            gradients are those of the compiled model, and the report names their
            difference from the plain ones. "auto": measure all three, take the fastest.
            Parts that are already compiled run uncompiled until `remove`. See the guide
            "Compiled models".

    Returns:
        The model, and the report. `Fit.remove` removes the plan.

    Raises:
        InfeasibleError: No plan fits; it names the smallest feasible budget.
        UsageError: The arguments describe no step, or no budget.

    Examples:
        >>> def layer():
        ...     return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
        >>> model = nn.Sequential(*(layer() for _ in range(8)))
        >>> model, report = fit(model, torch.ones(512, 64), 0.6, loss=Tensor.sum)
        >>> report.measured_peak_bytes <= report.budget_bytes
        True
        >>> report.measured_peak_bytes < report.plain_peak_bytes
        True
        >>> _ = report.remove()
    """
    started = time.perf_counter()
    check_budget(budget)
    optimizers = optimizers_of(optimizer)
    check_verify(verify)
    allowed = actions_of(allow)
    check_compile(compile)
    described = training_step(
        one_model(model, step),
        batch,
        loss=loss,
        step=step,
        device=device,
        accumulate=accumulate,
    )
    advice = evaluation_advice(described.model)
    if advice is not None:
        warnings.warn(BudgetWarning(advice), stacklevel=user_stacklevel())
    known = plans_in(described.model)
    try:
        around = suspended_compilation(described.model) if compile else nullcontext()
        with around:
            report = _fitted(
                described,
                budget,
                optimizers,
                allowed,
                verify,
                _executors(compile, described.model),
                blocks,
                progress,
                rerun=rerun,
            )
        if isinstance(report, CompiledFit):
            report.apply()
        watch_optimizers(
            described.model, optimizers, report.measured_peak_bytes, report.budget_bytes
        )
        report.total_seconds = time.perf_counter() - started
        if isinstance(report, Fit):
            report.verify = verify
        return model, report
    except BaseException:
        # Including an interrupt after the plan was applied.
        remove_plans(described.model, known)
        raise


def _executors(
    compile: Compile,  # noqa: A002
    model: nn.Module,
) -> tuple[Literal[False] | Executor, ...]:
    """Return the executors to try, of which the fastest is used."""
    if compile != "auto":
        return (compile,)
    # The recorder cannot see operators of compiled code. For units: as below.
    is_alone = is_compiled(model) or has_units_inside(model)
    return ("inductor", "exact") if is_alone else ("inductor", "exact", False)


def _fitted(  # noqa: PLR0913 (the step and the budget)
    described: TrainingStep,
    budget: Budget,
    optimizers: Sequence[Optimizer],
    allowed: frozenset[Action],
    verify: Verify,
    executors: Sequence[Literal[False] | Executor],
    blocks: Sequence[str] | None,
    progress: Progress | bool | None,  # noqa: FBT001
    *,
    rerun: bool | None,
) -> Fit | CompiledFit:
    """Measure the step, then find a plan that fits; an eager one is applied."""
    with (
        progress_for(progress, runs=_RUNS) as course,
        untouched(described) as repeated,
    ):
        counted = replace(repeated, run=course.counting(repeated.run))
        loop = ClosedLoop(counted, allowed, verify, course, rerun=rerun)
        loop.reserve(optimizers)
        loop.measure(blocks)
        plain_bytes = loop.search.plain_bytes + loop.reserved_bytes
        asked_bytes = loop.asked_bytes(budget)
        try:
            return fastest(
                {
                    str(executor): partial(
                        _fit_by,
                        executor,
                        counted,
                        loop,
                        asked_bytes,
                        blocks,
                        is_alone=len(executors) == 1,
                    )
                    for executor in executors
                }
            )
        except InfeasibleError as error:
            reworded = in_units_of(error, budget, plain_bytes)
            reworded.page = partial(
                _infeasible_page,
                described.model,
                loop.search,
                asked_bytes,
                loop.reserved_bytes,
            )
            raise reworded from None


def _infeasible_page(
    model: nn.Module, search: Search, asked_bytes: int, reserved_bytes: int
) -> str:
    """Return the page for an infeasible budget, with the smallest plan."""
    return page(
        graph_findings(
            search.graph,
            model,
            others=frontier_and_rules(search, points=5),
            chosen=floor_with(search).plans,
            budget_bytes=asked_bytes,
            reserved_bytes=reserved_bytes,
        )
    )


def _fit_by(
    executor: Literal[False] | Executor,
    step: TrainingStep,
    loop: ClosedLoop,
    asked_bytes: int,
    blocks: Sequence[str] | None,
    *,
    is_alone: bool,
) -> Fit | CompiledFit:
    """Return the eager fit, applied, or the compiled fit, not applied.

    If compiled blocks alone do not fit and no other executor is requested, regions
    recompute the rest of the model, or everything.
    """
    if not executor:
        settled = loop.settle(asked_bytes)
        settled.attempt.adapted.finish_measuring()
        return _report(step.model, loop, asked_bytes, settled)
    plain = PlainStep(
        loop.search.plain_bytes + loop.reserved_bytes,
        loop.search.plain_seconds,
        loop.graph,
        loop.resident,
        loop.reserved_bytes,
        loop.graph.link_bytes_per_second if Action.OFFLOAD in loop.allow else 0.0,
    )
    compiled = partial(
        fit_compiled, step, asked_bytes, executor=executor, plain=plain, tell=loop.tell
    )
    try:
        return compiled(blocks=blocks)
    except InfeasibleError as error:
        # Not tried for sharded units: regions beside compiled blocks.
        if not is_alone or has_units_inside(step.model):
            raise
        known = error
    try:
        settled = loop.settle(asked_bytes)
    except InfeasibleError as error:
        raise min(known, error, key=lambda each: each.floor_bytes) from None
    adapted = settled.attempt.adapted
    adapted.remove()
    found = fit_with_regions(settled, compiled, step.model, loop.graph)
    if found is not None:
        return found
    adapted.put_on(step.model)
    adapted.finish_measuring()
    report = _report(step.model, loop, asked_bytes, settled)
    report.contenders = {executor: f"needs {print_bytes(known.floor_bytes)}"}
    return report


def check_compile(compile: object) -> None:  # noqa: A002
    """Raise `UsageError` if the executor is unknown."""
    if compile not in (False, "exact", "inductor", "auto"):
        raise UsageError(
            'expected compile=False, "exact", "inductor" or "auto", got '
            f"{compile!r}; see the guide on compiled models."
        )


def _report(
    model: nn.Module, loop: ClosedLoop, asked_bytes: int, settled: Settled
) -> Fit:
    search = loop.search
    tried, solution = settled.attempt, settled.solution
    return Fit(
        model=model,
        plan=replace(
            tried.adapted.plan, budget_bytes=asked_bytes, seconds=solution.seconds
        ),
        graph=loop.graph,
        budget_bytes=asked_bytes,
        plain_peak_bytes=search.plain_bytes + loop.reserved_bytes,
        plain_seconds=search.plain_seconds,
        predicted_peak_bytes=solution.peak_bytes + loop.reserved_bytes,
        predicted_seconds=solution.seconds,
        planned_seconds=tried.solution.seconds,
        measured_peak_bytes=tried.cost.peak_bytes + loop.reserved_bytes,
        measured_seconds=settled.pace.seconds,
        reserved_bytes=loop.reserved_bytes,
        gap=solution.gap,
        planner=solution.planner,
        planning_seconds=loop.planning_seconds,
        rounds=loop.rounds,
        _adapted=tried.adapted,
        search=loop.search,
    )

"""The work behind the commands, and whose fault an error of a step is."""

import os
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import CodeType, FrameType
from typing import Any, Literal, cast

import torch
from rich.console import Console

from recoup.backend.compiler.partitioning import Executor
from recoup.backend.memory.meters import is_out_of_memory
from recoup.cli.statuses import TARGET, CommandError
from recoup.cli.targets import Target, first_line
from recoup.core.callers import calls_user, is_calling_user
from recoup.core.compiled_plan import CompiledPlan, CompiledStep
from recoup.core.graph import Graph
from recoup.core.segments import Action
from recoup.core.units import print_bytes
from recoup.errors import InfeasibleError, RecoupError, UsageError
from recoup.fitting.benchmark import Entry, run_benchmark
from recoup.fitting.budgets import budget_bytes, budget_for_floor, infeasible_with
from recoup.fitting.collected_findings import frontier_and_rules, graph_findings
from recoup.fitting.compiled_fit import CompiledFit
from recoup.fitting.fit import Compile, Fit, fit
from recoup.fitting.largest_batch import LargestBatch, largest_batch
from recoup.fitting.measuring import frontier, measure
from recoup.fitting.progress import bar
from recoup.measurement.steps.optimizers import missing_state_bytes, state_bytes
from recoup.measurement.steps.training_step import device_of, takes_target
from recoup.planners.infeasible import in_units_of
from recoup.planners.planner import plan_with
from recoup.planners.search import Search
from recoup.report.composition import Plans
from recoup.report.findings import Findings
from recoup.train.budgeting.comparison import Comparison, compare_configurations


def fit_target(
    target: Target,
    budget: str | None,
    *,
    offload: bool,
    points: int,
    compile: str | None = None,  # noqa: A002 (the option's name)
) -> tuple[Fit | CompiledFit, Findings]:
    """Fit the user's model; return the fit and its findings."""
    with blaming_step(target):
        _, fitted = fit(
            target.model,
            target.batch,
            budget,
            loss=target.loss,
            step=target.step,
            optimizer=target.optimizer,
            allow=_allowed(offload=offload),
            # A runtime value: the result is of either kind.
            compile=cast("Literal['auto']", compile or False),
        )
    with _status(f"planning for {points} other budgets"):
        return fitted, fitted.findings(title=target.name, points=points)


def largest_batch_of(
    make: Callable[[int], Target],
    budget: str | None,
    *,
    slowdown: float,
    limit: int,
    compile: str | None,  # noqa: A002 (the option's name)
) -> LargestBatch:
    """Find the largest batch for the user's model, which is made once."""
    first = make(1)
    with blaming_step(first):
        return largest_batch(
            first.model,
            lambda size: make(size).batch,
            budget,
            loss=first.loss,
            step=first.step,
            slowdown=slowdown,
            optimizer=first.optimizer,
            limit=limit,
            compile=cast("Compile", compile or False),
        )


def measure_target(target: Target) -> Graph:
    """Measure a step of the user's model."""
    doing = "running a step without memory" if target.dry else "measuring a step"
    with _status(doing), blaming_step(target):
        return measure(
            target.model,
            target.batch,
            loss=target.loss,
            step=target.step,
            dry=target.dry,
            device=target.device,
        )


def measure_findings(target: Target, budget: str | None) -> tuple[Graph, Findings]:
    """Measure a step; return its findings, with a plan if there is a budget.

    All peaks, and the smallest budget, include the later state of an optimizer.

    Raises:
        InfeasibleError: No plan fits into the budget.
    """
    graph = measure_target(target)
    reserved_bytes = _reserved_bytes(target)
    device = torch.device("cpu") if target.dry else device_of(target.model)
    search = Search(graph, _allowed(offload=False))
    asked_bytes = 0
    chosen: Plans = ()
    if budget is not None:
        plain_bytes = search.plain_bytes + reserved_bytes
        asked_bytes = budget_bytes(budget, plain_bytes, torch.device("cpu"))
        with _status(f"planning for {print_bytes(asked_bytes)}"):
            try:
                chosen = plan_with(search, asked_bytes - reserved_bytes).plans
            except InfeasibleError as error:
                reworded = infeasible_with(
                    error, asked_bytes, device, reserved_bytes=reserved_bytes
                )
                raise in_units_of(reworded, budget, plain_bytes) from None
    found = graph_findings(
        graph,
        target.model,
        chosen=chosen,
        budget_bytes=asked_bytes,
        reserved_bytes=reserved_bytes,
        title=target.name,
    )
    floor_bytes = budget_for_floor(search.floor_bytes + reserved_bytes, device)
    return graph, replace(found, floor_bytes=floor_bytes)


def _reserved_bytes(target: Target) -> int:
    """Return the bytes of an optimizer's state that a measured step did not count."""
    if target.optimizer is None:
        return 0
    device = device_of(target.model)
    missing_bytes = missing_state_bytes(target.optimizer, device)
    if device.type == "meta":
        # Meta stands for the CPU, which holds some state in any case.
        missing_bytes += missing_state_bytes(target.optimizer, torch.device("cpu"))
    if target.dry or device.type == "cpu":
        # No allocator counted the existing state.
        return missing_bytes + state_bytes(target.optimizer)
    return missing_bytes


def frontier_findings(target: Target, points: int, *, offload: bool) -> Findings:
    """Measure a step, and find the fastest plans for many budgets.

    All peaks include the later state of an optimizer.
    """
    graph = measure_target(target)
    with bar("planning") as show:
        others = frontier_and_rules(
            Search(graph, _allowed(offload=offload)),
            points,
            lambda done, total: show(f"planning for {total} budgets", done, total),
        )
    return graph_findings(
        graph,
        target.model,
        others=others,
        reserved_bytes=_reserved_bytes(target),
        title=target.name,
    )


def compiled_step_of(target: Target, executor: str) -> CompiledStep:
    """Measure a step of the user's model with compiled blocks.

    Both peaks include the later state of an optimizer.
    """
    with _status("compiling each kind of block"), blaming_step(target):
        found = measure(
            target.model,
            target.batch,
            loss=target.loss,
            step=target.step,
            compile=cast("Executor", executor),
        )
    more_bytes = _reserved_bytes(target)
    return replace(
        found,
        peak_bytes=found.peak_bytes + more_bytes,
        floor_bytes=found.floor_bytes + more_bytes,
    )


def compiled_frontier_of(
    target: Target, points: int, executor: str
) -> tuple[CompiledPlan, ...]:
    """Find the fastest plans of compiled blocks for many budgets.

    All peaks include the later state of an optimizer.
    """
    with _status("compiling one option of each kind of block"), blaming_step(target):
        plans = frontier(
            target.model,
            target.batch,
            loss=target.loss,
            step=target.step,
            points=points,
            compile=cast("Executor", executor),
        )
    more_bytes = _reserved_bytes(target)
    return tuple(replace(p, peak_bytes=p.peak_bytes + more_bytes) for p in plans)


def compare_target(
    target: Target, budgets: Sequence[str], *, offload: bool
) -> tuple[Entry, ...]:
    """Measure recoup and PyTorch's own tools on the user's step."""
    with bar("measuring") as show, blaming_step(target):
        return run_benchmark(
            target.model,
            target.batch,
            budgets=budgets,
            loss=target.loss,
            step=target.step,
            offload=offload,
            progress=lambda name, done, total: show(f"measuring {name}", done, total),
        )


def table_target(
    target: Target, precision: str, segment_size: int | None = None
) -> Comparison:
    """Measure the four rows for the user's model."""
    loss, batch = target.loss, target.batch

    @calls_user
    def loss_of_output(output: Any, _: Any) -> Any:
        return target.loss(output)

    if target.step is not None or batch is None:
        raise UsageError(
            "expected a model, a batch and a loss for the table, which runs its own "
            "steps, got a step; return these from the function, not a step."
        )
    if loss is not None and not takes_target(loss):
        batch, loss = (batch, None), loss_of_output
    with _status("measuring four configurations"), blaming_step(target):
        return compare_configurations(
            target.model,
            batch,
            optimizer=target.optimizer,
            loss_fn=loss,
            precision=precision,
            checkpoint_segment_size=segment_size,
        )


def step_numbers(graph: Graph, found: Findings) -> dict[str, Any]:
    """Return the main numbers of a measured step, and of a plan under a budget."""
    numbers: dict[str, Any] = {
        "operators": len(graph.operations),
        "moments": graph.moments,
        "saved_tensors": len(graph.saves),
        "saved_bytes": graph.saved_bytes,
        "plain_peak_bytes": found.plain_peak_bytes,
        "floor_bytes": found.floor_bytes,
        "step_seconds": graph.step_seconds,
        "estimated_for": graph.estimated_for,
        "link_bytes_per_second": graph.link_bytes_per_second,
    }
    if found.budget_bytes:
        numbers |= {
            "budget_bytes": found.budget_bytes,
            "planned_peak_bytes": found.plan.peak_bytes,
            "planned_seconds": found.plan.seconds,
        }
    return numbers


def _allowed(*, offload: bool) -> frozenset[Action]:
    return frozenset({Action.KEEP, Action.OFFLOAD} if offload else {Action.KEEP})


def other_work(device: torch.device) -> str:
    """Return a warning if other programs use the CPU, so that timings are noisy."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if device.type != "cpu" or load < cores / 2:
        return ""
    return (
        f"Noise: other programs were running when this began (load {load:.1f} on "
        f"{cores} cores); the times are not reliable."
    )


def noise(target: Target) -> str:
    """Return a warning if timings are noisy now; a dry run has none."""
    return "" if target.dry else other_work(device_of(target.model))


@contextmanager
def _status(doing: str) -> Generator[None]:
    with Console(stderr=True).status(f"recoup: {doing}"):
        yield


_RECORDERS = frozenset(
    {"recoup.engine.recording.recorder", "recoup.backend.operators.dispatch"}
)
"""Modules in which recoup runs the operators of a step itself."""

_REFUSALS = (RuntimeError, IndexError)
"""Errors that operators raise for wrong arguments."""


@contextmanager
def blaming_step(target: Target) -> Generator[None]:
    """Turn an error of the user's own step into a `CommandError` with one sentence.

    Errors of recoup, and errors that recoup may have caused, pass unchanged. So do
    out-of-memory errors, which have their own advice.

    Raises:
        CommandError: The step of the target raised, or tried to exit.
    """
    try:
        yield
    except RecoupError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error) or not is_of_step(error, target.step):
            raise
        notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
        raise CommandError(
            f"the step of {target.name} raised {type(error).__name__}: "
            f"{first_line(error)}.{notes} Run the step without recoup to see where, "
            "or give --debug.",
            status=TARGET,
        ) from error


def is_of_step(error: BaseException, step: Callable[[], object] | None = None) -> bool:
    """Return whether an error comes from the user's step, by its traceback.

    It does if recoup called the step and the last frame is not recoup's own. An
    operator that refuses its arguments is the step's, even where recoup runs it.

    Examples:
        >>> try:
        ...     [].pop()
        ... except IndexError as error:
        ...     is_of_step(error)
        False
        >>> is_of_step(SystemExit())
        True
    """
    if isinstance(error, SystemExit):
        return True  # recoup raises none
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    code = _code_of(step)
    if not any(is_calling_user(frame) or frame.f_code is code for frame in frames):
        return False
    last = frames[-1]
    refused = isinstance(error, _REFUSALS) and _module_of(last) in _RECORDERS
    return refused or is_calling_user(last) or not _is_ours(last)


def _is_ours(frame: FrameType) -> bool:
    return _module_of(frame).partition(".")[0] == "recoup"


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _code_of(function: Any) -> CodeType | None:
    while isinstance(function, partial):
        function = function.func
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    return getattr(function, "__code__", None)

"""The work behind the commands: everything that needs torch."""

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from rich.console import Console

from recoup.cli.blame import blaming_step
from recoup.cli.targets import Target
from recoup.core.callers import calls_user
from recoup.core.graph import Graph
from recoup.core.segments import Action
from recoup.core.units import print_bytes
from recoup.errors import InfeasibleError, UsageError
from recoup.fitting.benchmark import Entry, run_benchmark
from recoup.fitting.budgets import budget_bytes, budget_for_floor, infeasible_with
from recoup.fitting.collected_findings import frontier_and_rules, graph_findings
from recoup.fitting.compiled_fit import CompiledFit
from recoup.fitting.fit import Fit, fit
from recoup.fitting.largest_batch import LargestBatch, largest_batch
from recoup.fitting.measuring import measure
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
    make: Callable[[int], Target], budget: str | None, slowdown: float, limit: int
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
        )


@dataclass(frozen=True, slots=True)
class MeasureMode:
    """The mode of a measurement.

    Attributes:
        dry: Whether nothing is computed.
        device: The device whose times are estimated, if dry; None: this CPU.
    """

    dry: bool = False
    device: str | None = None


_REAL = MeasureMode()


def measure_target(target: Target, mode: MeasureMode = _REAL) -> Graph:
    """Measure a step of the user's model."""
    doing = "running a step without memory" if mode.dry else "measuring a step"
    with _status(doing), blaming_step(target):
        return measure(
            target.model,
            target.batch,
            loss=target.loss,
            step=target.step,
            dry=mode.dry,
            device=mode.device,
        )


def measure_findings(
    target: Target, mode: MeasureMode, budget: str | None
) -> tuple[Graph, Findings]:
    """Measure a step; return its findings, with a plan if there is a budget.

    All peaks, and the smallest budget, include the later state of an optimizer.

    Raises:
        InfeasibleError: No plan fits into the budget.
    """
    graph = measure_target(target, mode)
    reserved_bytes = _reserved_bytes(target, mode)
    device = torch.device("cpu") if mode.dry else device_of(target.model)
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


def _reserved_bytes(target: Target, mode: MeasureMode) -> int:
    """Return the bytes of an optimizer's state that a measured step did not count."""
    if target.optimizer is None:
        return 0
    device = device_of(target.model)
    missing_bytes = missing_state_bytes(target.optimizer, device)
    if device.type == "meta":
        # Meta stands for the CPU, which holds some state in any case.
        missing_bytes += missing_state_bytes(target.optimizer, torch.device("cpu"))
    if mode.dry or device.type == "cpu":
        # No allocator counted the existing state.
        return missing_bytes + state_bytes(target.optimizer)
    return missing_bytes


def frontier_findings(
    target: Target, points: int, *, offload: bool, mode: MeasureMode = _REAL
) -> Findings:
    """Measure a step, and find the fastest plans for many budgets.

    All peaks include the later state of an optimizer.
    """
    graph = measure_target(target, mode)
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
        reserved_bytes=_reserved_bytes(target, mode),
        title=target.name,
    )


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
    """Return a warning if timings are noisy now."""
    return other_work(device_of(target.model))


@contextmanager
def _status(doing: str) -> Generator[None]:
    with Console(stderr=True).status(f"recoup: {doing}"):
        yield

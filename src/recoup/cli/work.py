"""The work behind the commands: everything that needs torch."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from recoup.api.budgets import budget_bytes, infeasible_with
from recoup.api.contest import Entry, contest
from recoup.api.findings import graph_findings
from recoup.api.fit import Fit, fit
from recoup.api.measuring import measure
from recoup.api.progress import bar
from recoup.cli.faults import told_apart
from recoup.cli.targets import Target
from recoup.core.errors import InfeasibleError, UsageError
from recoup.core.graph import Graph
from recoup.core.segments import Action, Segment
from recoup.core.simulation import simulate
from recoup.core.units import print_bytes
from recoup.measure.optimizers import missing_state_bytes
from recoup.measure.training import takes_target
from recoup.planners.plan import floor, frontier, plan
from recoup.report.findings import Findings
from recoup.train.comparison import Comparison, compare_configurations


def fit_target(
    target: Target, budget: str | None, *, offload: bool, points: int
) -> tuple[Fit, Findings]:
    """Fit the user's model, and return what was found."""
    allow = {Action.KEEP, Action.OFFLOAD} if offload else {Action.KEEP}
    with told_apart(target):
        _, fitted = fit(
            target.model,
            target.batch,
            budget,
            loss=target.loss,
            step=target.step,
            optimizer=target.optimizer,
            allow=allow,
        )
    with _status(f"planning for {points} other budgets"):
        return fitted, fitted.findings(title=target.name, points=points)


@dataclass(frozen=True, slots=True)
class Way:
    """How a step is measured.

    Attributes:
        dry: Without computing it.
        device: The device whose times are estimated, if dry; None: this processor.
    """

    dry: bool = False
    device: str | None = None


_REAL = Way()


def measure_target(target: Target, way: Way = _REAL) -> Graph:
    """Measure a step of the user's model."""
    doing = "running a step without memory" if way.dry else "measuring a step"
    with _status(doing), told_apart(target):
        return measure(
            target.model,
            target.batch,
            loss=target.loss,
            step=target.step,
            dry=way.dry,
            device=way.device,
        )


def measure_findings(
    target: Target, way: Way, budget: str | None
) -> tuple[Graph, Findings]:
    """Measure a step; return what is known of it, and of a plan if there is a budget.

    Room is left for the state of an optimizer that has none yet.

    Raises:
        InfeasibleError: No plan fits into the budget.
    """
    graph = measure_target(target, way)
    reserved_bytes = _reserved_bytes(target)
    asked_bytes = 0
    chosen: tuple[Segment, ...] = ()
    if budget is not None:
        plain_bytes = simulate(graph, ()).peak_bytes + reserved_bytes
        asked_bytes = budget_bytes(budget, plain_bytes, torch.device("cpu"))
        with _status(f"planning for {print_bytes(asked_bytes)}"):
            chosen = _chosen(graph, asked_bytes, reserved_bytes)
    found = graph_findings(
        graph,
        target.model,
        chosen=chosen,
        budget_bytes=asked_bytes,
        reserved_bytes=reserved_bytes,
        title=target.name,
    )
    return graph, found


def _chosen(graph: Graph, asked_bytes: int, reserved_bytes: int) -> tuple[Segment, ...]:
    try:
        left_bytes = asked_bytes - reserved_bytes
        return plan(graph, left_bytes, allow=_allowed(offload=False)).segments
    except InfeasibleError as error:
        raise infeasible_with(error, reserved_bytes, asked_bytes) from None


def _reserved_bytes(target: Target) -> int:
    if target.optimizer is None:
        return 0
    parameters = target.optimizer.param_groups[0]["params"]
    return missing_state_bytes(target.optimizer, parameters[0].device)


def frontier_findings(
    target: Target, points: int, *, offload: bool, way: Way = _REAL
) -> Findings:
    """Measure a step, and work out the fastest plans for many budgets."""
    graph = measure_target(target, way)
    allow = _allowed(offload=offload)
    with bar("planning") as show:
        others = frontier(
            graph,
            points=points,
            allow=allow,
            progress=lambda done, total: show(
                f"planning for {total} budgets", done, total
            ),
        )
    return graph_findings(graph, target.model, others=others, title=target.name)


def compare_target(
    target: Target, budgets: Sequence[str], *, offload: bool
) -> tuple[Entry, ...]:
    """Measure recoup and PyTorch's own ways on the user's step, side by side."""
    with bar("measuring") as show, told_apart(target):
        return contest(
            target.model,
            target.batch,
            budgets=budgets,
            loss=target.loss,
            step=target.step,
            offload=offload,
            tell=lambda name, done, total: show(f"measuring {name}", done, total),
        )


def table_target(
    target: Target, precision: str, segment_size: int | None = None
) -> Comparison:
    """Measure the four rows for the user's model."""
    loss, batch = target.loss, target.batch

    def loss_of_output(output: Any, _: Any) -> Any:
        return target.loss(output)

    if target.step is not None or batch is None:
        raise UsageError(
            "the table runs steps of its own: it needs a model, a batch and a loss, "
            "not a step. Return these from the function."
        )
    if loss is not None and not takes_target(loss):
        batch, loss = (batch, None), loss_of_output
    with _status("measuring four configurations"), told_apart(target):
        return compare_configurations(
            target.model,
            batch,
            optimizer=target.optimizer,
            loss_fn=loss,
            precision=precision,
            checkpoint_segment_size=segment_size,
        )


def graph_numbers(graph: Graph) -> dict[str, Any]:
    """Return the main numbers of a measured step."""
    plain = simulate(graph, ())
    return {
        "operators": len(graph.operations),
        "moments": graph.moments,
        "saved_tensors": len(graph.saves),
        "saved_bytes": graph.saved_bytes,
        "plain_peak_bytes": plain.peak_bytes,
        "floor_bytes": floor(
            graph, allow=frozenset({Action.KEEP})
        ).simulation.peak_bytes,
        "step_seconds": graph.step_seconds,
        "estimated_for": graph.estimated_for,
        "link_bytes_per_second": graph.link_bytes_per_second,
    }


def _allowed(*, offload: bool) -> frozenset[Action]:
    return frozenset({Action.KEEP, Action.OFFLOAD} if offload else {Action.KEEP})


@contextmanager
def _status(doing: str) -> Generator[None]:
    with Console(stderr=True).status(f"recoup: {doing}"):
        yield

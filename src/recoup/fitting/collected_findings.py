"""From a measured or fitted model to the findings that reports show."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from recoup.core.graph import Graph
from recoup.core.location import locate
from recoup.core.segments import Action
from recoup.core.units import print_seconds
from recoup.engine.applied.applied_plan import digest_of
from recoup.fitting.environment import environment, resident_bytes
from recoup.planners.planner import frontier_with, plan_with
from recoup.planners.search import Search
from recoup.planners.solution import Solution
from recoup.report.composition import Known, Plans, compose, rule_peaks
from recoup.report.findings import Findings

if TYPE_CHECKING:
    from recoup.fitting.fit import Fit


def fit_findings(
    fitted: "Fit", *, title: str = "", points: int = 7, device: str | None = None
) -> Findings:
    """Return what `fit` found, with the frontier around the active plan.

    Costs a planning and a simulation for each point.

    Args:
        fitted: What `fit` returned.
        title: What the report is about; by default the kind of the model.
        points: How many other plans are worked out; 0: none.
        device: Where it ran; by default where the model is.
    """
    model = fitted.model
    allow = frozenset({Action.KEEP, *map(Action, fitted.plan.count())})
    search = fitted.search or Search(fitted.graph, allow)
    return compose(
        fitted.graph,
        [
            locate(graph, plan)
            for graph, plan in zip(fitted.graph.passes, fitted.plan.parts, strict=True)
        ],
        frontier_and_rules(search, points) if points else (),
        Known(
            title=title or type(model).__name__,
            budget_bytes=fitted.budget_bytes,
            floor_bytes=fitted.floor_bytes,
            measured_peak_bytes=fitted.measured_peak_bytes,
            measured_seconds=fitted.measured_seconds,
            resident=resident_bytes(model),
            reserved_bytes=fitted.reserved_bytes,
            environment=environment(_device(model, device)),
            checks=_checks(fitted),
            model=digest_of(model),
        ),
    )


def frontier_and_rules(
    search: Search,
    points: int,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Solution, ...]:
    """Return plans for budgets evenly spread, and for the peak of each known rule.

    So that each rule can be compared with a plan of the same peak.

    Args:
        search: Knows the step, and plans of it.
        points: For how many budgets, evenly spread.
        progress: Is called with the number of budgets that are done, and of all.
    """
    peaks = set(rule_peaks(search.graph)) - {search.plain_bytes}
    ours = [plan_with(search, n) for n in sorted(peaks) if n >= search.floor_bytes]
    return (*frontier_with(search, points=points, progress=progress), *ours)


def graph_findings(  # noqa: PLR0913 (a report has many parts)
    graph: Graph,
    model: nn.Module,
    *,
    others: Sequence[Solution] = (),
    chosen: Plans = (),
    budget_bytes: int = 0,
    reserved_bytes: int = 0,
    title: str = "",
) -> Findings:
    """Return what is known of a measured step, without running a plan.

    Args:
        graph: What `measure` returned.
        model: The model.
        others: Plans to show.
        chosen: The plan to show first, the segments of each pass; empty: plain.
        budget_bytes: The budget it is for; 0: none.
        reserved_bytes: What is kept free besides, as for an optimizer's state.
        title: What the report is about; by default the kind of the model.
    """
    return compose(
        graph,
        chosen,
        others,
        Known(
            title=title or type(model).__name__,
            budget_bytes=budget_bytes,
            resident=resident_bytes(model),
            reserved_bytes=reserved_bytes,
            environment=environment(
                _device(model, None), estimated_for=graph.estimated_for
            ),
            model=digest_of(model),
        ),
    )


def _checks(fitted: "Fit") -> tuple[tuple[str, str], ...]:
    """Return what `fit` verified, and how."""
    measured, predicted = fitted.measured_peak_bytes, fitted.predicted_peak_bytes
    if fitted.tightenings:
        peak = (
            f"planned again for less memory after a step ran out of it: {predicted} B "
            "is a prediction"
        )
    else:
        peak = (
            f"measured on a real step: {measured} B, budget {fitted.budget_bytes} B, "
            f"{measured / max(predicted, 1) - 1:+.2%} to the prediction"
        )
    values = (
        "the fingerprint of each saved value was that of forward's, on a real step "
        f"(verify={fitted.verify!r})"
    )
    if fitted.verify == "off":
        values = "not compared: verify='off'"
    seconds = (
        f"measured {print_seconds(fitted.measured_seconds)}, predicted "
        f"{print_seconds(fitted.predicted_seconds)}; slowness is predicted, from the "
        "same timings for all plans"
    )
    gap = (
        f"no plan that fits is predicted to be more than {fitted.gap:.1%} faster "
        f"({fitted.planner}; {fitted.rounds} tried on real steps)"
    )
    return (
        ("peak memory", peak),
        ("recomputed values", values),
        ("time", seconds),
        ("optimality", gap),
    )


def _device(model: nn.Module, device: str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")

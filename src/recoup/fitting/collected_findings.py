"""Collect the findings about a measured or fitted model for reports."""

import platform
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch
from torch import nn

from recoup.backend.memory.ledger import storages_in
from recoup.core.device_figures import figures_of
from recoup.core.graph import Graph
from recoup.core.plan import locate
from recoup.core.segments import Action
from recoup.core.units import print_bytes, print_seconds
from recoup.core.version import VERSION
from recoup.engine.applied.applied_plan import digest_of
from recoup.measurement.steps.training_step import device_of
from recoup.planners.planner import frontier_with, plan_with
from recoup.planners.search import Search
from recoup.planners.solution import Solution
from recoup.report.composition import Known, Plans, compose, rule_peaks
from recoup.report.findings import Findings

if TYPE_CHECKING:
    from recoup.fitting.fit import Fit


def fit_findings(fitted: "Fit", *, title: str = "", points: int = 7) -> Findings:
    """Return the findings of `fit`, with the frontier around the active plan.

    Costs planning and simulation for each point.
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
            environment=environment(device_of(model)),
            checks=_checks(fitted),
            model=digest_of(model),
        ),
    )


def frontier_and_rules(
    search: Search,
    points: int,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Solution, ...]:
    """Return plans for evenly spaced budgets, and for the peak of each known rule.

    The latter allow comparing each rule with a plan of the same peak.
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
    """Return the findings about a measured step, without running a plan."""
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
                device_of(model), estimated_for=graph.estimated_for
            ),
            model=digest_of(model),
        ),
    )


def _checks(fitted: "Fit") -> tuple[tuple[str, str], ...]:
    """Return descriptions of what `fit` checked."""
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


def environment(
    device: torch.device, *, estimated_for: str = ""
) -> tuple[tuple[str, str], ...]:
    """Return names and values of the environment of a measurement.

    Examples:
        >>> [name for name, _ in environment(torch.device("cpu"))]
        ['recoup', 'torch', 'Python', 'system', 'device', 'date']
    """
    return (
        ("recoup", VERSION),
        ("torch", str(torch.__version__)),
        ("Python", platform.python_version()),
        ("system", f"{platform.system()} {platform.machine()}"),
        ("device", _estimate_words(estimated_for) or device_words(device)),
        ("date", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")),
    )


def device_words(device: torch.device) -> str:
    """Describe a device.

    Examples:
        >>> device_words(torch.device("cpu"))
        'the CPU'
    """
    if device.type == "cuda":
        _, total_bytes = torch.cuda.mem_get_info(device)
        return f"{torch.cuda.get_device_name(device)}, {print_bytes(total_bytes)}"
    return "the CPU" if device.type == "cpu" else str(device)


def _estimate_words(name: str) -> str:
    if not name:
        return ""
    if name == "cpu":
        return "the CPU; times estimated"
    figures = figures_of(name)
    memory = print_bytes(figures.memory_bytes)
    return f"{name}, {memory}, not here; times estimated by its figures"


def resident_bytes(model: nn.Module) -> tuple[tuple[str, int], ...]:
    """Return names and bytes of a model's resident memory.

    Each storage counts once, even if parameters share it.

    Examples:
        >>> resident_bytes(nn.Linear(2, 2))
        (('parameters', 24),)
    """
    found: list[tuple[str, int]] = []
    seen: set[int] = set()
    for name, tensors in (
        ("parameters", model.parameters()),
        ("buffers", model.buffers()),
    ):
        total = _bytes_of(tensors, seen)
        if total:
            found.append((name, total))
    return tuple(found)


def _bytes_of(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    total = 0
    for storage in storages_in(list(tensors)):
        if id(storage) not in seen:
            seen.add(id(storage))
            total += storage.nbytes()
    return total

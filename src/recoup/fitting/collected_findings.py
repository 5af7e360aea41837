"""From a measured or fitted model to the findings that reports show."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from recoup.core.graph import Graph
from recoup.core.location import locate
from recoup.core.segments import Action, Segment
from recoup.fitting.environment import environment, resident_bytes
from recoup.planners.plan import frontier_with
from recoup.planners.search import Search
from recoup.planners.solution import Solution
from recoup.report.composition import compose
from recoup.report.findings import Findings

if TYPE_CHECKING:
    from recoup.fitting.fit import Fit


def fit_findings(
    fitted: "Fit", *, title: str = "", points: int = 7, device: str | None = None
) -> Findings:
    """Return what `fit` found, with the frontier around the plan in force.

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
    others = frontier_with(search, points=points) if points else ()
    return compose(
        fitted.graph,
        locate(fitted.graph, fitted.plan),
        others,
        title=title or type(model).__name__,
        budget_bytes=fitted.budget_bytes,
        floor_bytes=fitted.floor_bytes,
        measured_peak_bytes=fitted.measured_peak_bytes,
        measured_seconds=fitted.measured_seconds,
        resident=resident_bytes(model),
        reserved_bytes=fitted.reserved_bytes,
        environment=environment(_device(model, device)),
    )


def graph_findings(  # noqa: PLR0913 (a report has many parts)
    graph: Graph,
    model: nn.Module,
    *,
    others: Sequence[Solution] = (),
    chosen: Sequence[Segment] = (),
    budget_bytes: int = 0,
    reserved_bytes: int = 0,
    title: str = "",
) -> Findings:
    """Return what is known of a measured step, without running a plan.

    Args:
        graph: What `measure` returned.
        model: The model.
        others: Plans to show.
        chosen: The plan to show first; by default the plain run.
        budget_bytes: The budget it is for; 0: none.
        reserved_bytes: What is kept free besides, as for an optimizer's state.
        title: What the report is about; by default the kind of the model.
    """
    return compose(
        graph,
        chosen,
        others,
        title=title or type(model).__name__,
        budget_bytes=budget_bytes,
        resident=resident_bytes(model),
        reserved_bytes=reserved_bytes,
        environment=environment(
            _device(model, None), estimated_for=graph.estimated_for
        ),
    )


def _device(model: nn.Module, device: str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")

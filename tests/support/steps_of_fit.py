"""The steps that `fit` runs, each with its peak."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

import recoup
from recoup.backend.memory.meters import StorageMeter
from recoup.engine.applied.applied_plan import plans_in
from recoup.engine.applied.planned_runs import Cuts
from recoup.fitting.following.replanning import least_verification_bytes
from recoup.results import Fit

_CPU = torch.device("cpu")


def has_plan(models: Sequence[nn.Module]) -> bool:
    """Return whether a plan is applied: not the cuts of the measurement, nor none."""
    applied = [each for model in models for each in plans_in(model)]
    return bool(applied) and not any(isinstance(each._plan, Cuts) for each in applied)


def fit_metered(
    models: Sequence[nn.Module], run: Callable[[], object], budget: float
) -> tuple[Fit, list[int]]:
    """Fit a step; return the peak of each of its runs that had a plan as well.

    Tensors that exist before the step count only if they are in the models.
    """
    peaks: list[int] = []

    def step() -> None:
        with StorageMeter() as meter:
            meter.track(*models)
            run()
        if has_plan(models):
            peaks.append(meter.peak_bytes)

    model = list(models) if len(models) > 1 else models[0]
    _, report = recoup.fit(model, step=step, budget=budget)
    return report, peaks


def missing_bytes(report: Fit) -> int:
    """Return by how much verification may exceed the budget in `fit` on the CPU.

    By as much as the plan leaves too little for the least that it needs.
    """
    free_bytes = report.budget_bytes - report.measured_peak_bytes
    return max(0, least_verification_bytes(report.graph, _CPU) - free_bytes)

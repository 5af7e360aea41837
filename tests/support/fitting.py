"""Fit a model of the zoo to a budget, and write down all that came of it."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import recoup
from benchmarks.zoo.case import Case
from benchmarks.zoo.problem import Problem
from recoup.core.segments import Action
from recoup.errors import InfeasibleError
from recoup.planners.search import Search
from tests.support.bits import tree_differences
from tests.support.twin import generator_states, leftovers, seed_generators

PROCESSOR = torch.device("cpu")


@dataclass(frozen=True)
class Outcome:
    """What fitting one model to one budget came to.

    Attributes:
        budget_bytes: The budget.
        floor_bytes: The smallest budget that can be met, as the error said.
        fits: Whether there was a plan.
        predicted_peak_bytes: The peak that the plan was said to have.
        reported_peak_bytes: The peak that `fit` measured.
        peak_bytes: The peak that we measured afterwards.
        differences: How a step differed from that of the plain twin.
        left_behind: What was not as before, after the plan was taken off.
    """

    budget_bytes: int
    floor_bytes: int
    fits: bool
    predicted_peak_bytes: int = 0
    reported_peak_bytes: int = 0
    peak_bytes: int = 0
    differences: tuple[str, ...] = ()
    left_behind: tuple[str, ...] = field(default=())


def cell(
    case: Case, share: float | str, *, dtype: torch.dtype = torch.float32
) -> Outcome:
    """Fit a model to a share of its plain peak, or to its floor."""
    problem = Problem(case, "tiny", PROCESSOR, dtype=dtype)
    if isinstance(share, float):
        return outcome_of(case, int(share * problem.peak_bytes()), dtype=dtype)
    graph = recoup.measure(problem.model, problem.batch, loss=case.loss)
    floor = Search(graph, frozenset({Action.KEEP})).floor
    return outcome_of(case, floor[1].peak_bytes, dtype=dtype)


def outcome_of(
    case: Case, budget_bytes: int, *, dtype: torch.dtype = torch.float32
) -> Outcome:
    """Fit a model to a budget, compare a step with its twin, take the plan off."""
    problem = Problem(case, "tiny", PROCESSOR, dtype=dtype)
    expected = observed(problem)
    before = state_of(problem.model)
    try:
        _, report = recoup.fit(
            problem.model, problem.batch, budget_bytes, loss=case.loss
        )
    except InfeasibleError as error:
        lost = tree_differences(before, state_of(problem.model), where="")
        return Outcome(
            budget_bytes, error.floor_bytes, fits=False, left_behind=tuple(lost)
        )
    after = state_of(problem.model, without_hooks=True)
    lost = list(tree_differences({**before, "hooks": None}, after, where="fit: "))
    restore(problem.model, before["state"])
    peak_bytes = problem.peak_bytes()
    restore(problem.model, before["state"])
    found = observed(problem)
    restore(problem.model, before["state"])
    report.remove()
    lost += tree_differences(before, state_of(problem.model), where="remove: ")
    return Outcome(
        budget_bytes,
        0,
        fits=True,
        predicted_peak_bytes=report.predicted_peak_bytes,
        reported_peak_bytes=report.measured_peak_bytes,
        peak_bytes=peak_bytes,
        differences=tuple(tree_differences(expected, found, where="")),
        left_behind=(*lost, *leftovers()),
    )


def observed(problem: Problem, *, steps: int = 2) -> dict[str, Any]:
    """Train for some steps from a seed, and return all that came of it.

    The model is afterwards as before.
    """
    before = state_of(problem.model)["state"]
    seed_generators(7)
    seen: list[Any] = []
    for _ in range(steps):
        problem.clear()
        problem.step()
        seen.append(
            {name: p.grad for name, p in problem.model.named_parameters()}
            | {name: b.clone() for name, b in problem.model.named_buffers()}
        )
    states = generator_states()
    problem.clear()
    restore(problem.model, before)
    return {"steps": seen, "generators": states}


def state_of(model: nn.Module, *, without_hooks: bool = False) -> dict[str, Any]:
    """Return everything of a model that `fit` has to leave or put back."""
    return {
        "state": copy.deepcopy(model.state_dict()),
        "gradients": [p.grad for p in model.parameters()],
        "requires": [p.requires_grad for p in model.parameters()],
        "training": [m.training for m in model.modules()],
        "hooks": None if without_hooks else hook_counts(model),
        "attributes": [sorted(m.__dict__) for m in model.modules()],
    }


def hook_counts(model: nn.Module) -> list[int]:
    """Return how many hooks each module has, of all kinds."""
    return [
        sum(
            len(value)
            for name, value in module.__dict__.items()
            if "hooks" in name and isinstance(value, Mapping)
        )
        for module in model.modules()
    ]


def restore(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put parameters and buffers back."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(state[name])


def gradients_after(model: nn.Module, step: Callable[[], object]) -> dict[str, Any]:
    """Return the gradients of one step from a seed; they are taken off again."""
    model.zero_grad(set_to_none=True)
    seed_generators(7)
    step()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found

"""Measured steps and findings to test reports on."""

from functools import cache

import torch
from torch import Tensor, nn

from recoup.core.graph import Boundary, Graph, Operation, Save, Storage, Value
from recoup.fitting.collected_findings import graph_findings
from recoup.fitting.measuring import measure
from recoup.planners.planner import frontier
from recoup.planners.solution import Solution
from recoup.report.findings import Findings


def small_model(layers: int = 5) -> nn.Module:
    """Make a chain of blocks of three layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
            for _ in range(layers)
        )
    )


@cache
def small_graph() -> Graph:
    """Measure a step of the small model, once."""
    return measure(small_model(), torch.ones(128, 16), loss=Tensor.sum)


@cache
def small_findings() -> Findings:
    """Make findings of the small model, with a frontier, once."""
    others = small_solutions()
    return graph_findings(
        small_graph(),
        small_model(),
        others=others,
        chosen=others[0].plans,
        budget_bytes=700_000,
    )


@cache
def small_solutions() -> tuple[Solution, ...]:
    """Plan for the small model, from the smallest peak to the largest."""
    return frontier(small_graph(), points=4)


def named_graph(name: str) -> Graph:
    """Make a chain of two operators whose block and operators have a certain name."""
    return Graph(
        operations=tuple(Operation(name, 1.0, (i,), (i + 1,)) for i in range(2)),
        backward=2,
        storages=(Storage(0, -1, 3), Storage(100, 0, 1), Storage(100, 1, 1)),
        values=tuple(Value(i, i - 1) for i in range(3)),
        saves=tuple(Save(i + 1, 3 - i, 3 - i) for i in range(2)),
        boundaries=(Boundary(0, 0, name), Boundary(2, 2, name, 0, entering=False)),
        other_bytes=(10, 10, 20, 20),
        step_seconds=3.0,
        blocks=(0, 1),
    )

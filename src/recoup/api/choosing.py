"""What a manager chooses: a way for one model, or for all that a step calls."""

from collections.abc import Sequence

from recoup.api.managed import KEEP, Managed
from recoup.api.open_calls import Row
from recoup.api.together import (
    Way,
    before_bytes,
    choose_together,
    loaded,
    peak_of,
    way_of,
    ways_of,
)
from recoup.core.errors import InfeasibleError
from recoup.core.graph import Graph
from recoup.planners.plan import floor_with, plan_with
from recoup.planners.search import Search


def way_within(graph: Graph, budget_bytes: int) -> Way:
    """Return the fastest way to run a model within a budget, or else the smallest.

    Examples:
        >>> way_within(Graph((), 0, (), (), (), (), ()), 0).added_bytes
        0
    """
    search = Search(graph, KEEP)
    try:
        solution = plan_with(search, before_bytes(graph) + budget_bytes)
    except InfeasibleError:
        solution = floor_with(search)
    return way_of(graph, solution.segments, solution.simulation)


def way_beside(graph: Graph, way: Way) -> Way:
    """Return a way for a model that does not fit beside those called before it.

    The one given, or one that both takes and holds little: more may follow.
    """
    ways = [way, *ways_of(graph, KEEP)]
    return min(ways, key=lambda each: each.held_bytes + each.added_bytes)


def peak_bytes(rows: Sequence[Row]) -> int:
    """Return the most that a step adds to memory which makes one of these calls."""
    models = {id(each): each for row in rows for each in row}
    parts = {key: each.part for key, each in models.items()}
    ways = {key: each.way for key, each in models.items()}
    return max((peak_of(row, parts, ways) for row in _keys(rows)), default=0)


def plan_together(rows: Sequence[Row], budget_bytes: int) -> None:
    """Let all models of some rows of calls run within a budget, or nearest to it."""
    models: dict[int, Managed] = {id(each): each for row in rows for each in row}
    parts = {key: each.flexible_part for key, each in models.items()}
    keys = _keys(rows)
    ways = choose_together(keys, parts, budget_bytes)
    for key, managed in models.items():
        graph = loaded(managed.measured, key, rows=keys, parts=parts, ways=ways)
        managed.run_so(ways[key], graph, budget_bytes=budget_bytes)


def _keys(rows: Sequence[Row]) -> list[list[int]]:
    return [[id(each) for each in row] for row in rows]

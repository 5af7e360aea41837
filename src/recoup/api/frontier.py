"""frontier: the fastest plans for budgets from the smallest possible to none at all."""

from collections.abc import Callable

from recoup.core.errors import InfeasibleError, UsageError
from recoup.core.graph import Graph
from recoup.core.segments import Action
from recoup.core.simulation import simulate
from recoup.planners.plan import EXACT, plan
from recoup.planners.solution import Solution


def frontier(
    graph: Graph,
    points: int = 9,
    *,
    allow: frozenset[Action] = EXACT,
    progress: Callable[[int], None] | None = None,
) -> tuple[Solution, ...]:
    """Return plans from the smallest peak to the plain run: more memory, less time.

    Plans for evenly spread budgets are worked out; those that another beats in both
    peak and time are left out.

    Costs a planning for each point.

    Args:
        graph: One step, as `measure` returns it.
        points: How many budgets are tried.
        allow: What may be done with a value besides recomputing it.
        progress: Called after each point with how many are done.

    Raises:
        UsageError: There are less than two points.

    Examples:
        >>> [
        ...     found.simulation.peak_bytes
        ...     for found in frontier(Graph((), 0, (), (), (), (), ()))
        ... ]
        [0]
    """
    if points < 2:
        raise UsageError(f"a frontier has at least two points: got {points}.")
    high = simulate(graph, ()).peak_bytes
    low = floor_bytes(graph, allow=allow)
    found: list[Solution] = []
    for number in range(points):
        budget_bytes = low + (high - low) * number // (points - 1)
        found.append(plan(graph, budget_bytes, allow=allow))
        if progress is not None:
            progress(number + 1)
    return _best(found)


def floor_bytes(graph: Graph, *, allow: frozenset[Action] = EXACT) -> int:
    """Return the smallest budget that can be met.

    Costs a planning.

    Examples:
        >>> floor_bytes(Graph((), 0, (), (), (), (), ()))
        0
    """
    try:
        return plan(graph, 0, allow=allow).simulation.peak_bytes
    except InfeasibleError as error:
        return error.floor_bytes


def _best(found: list[Solution]) -> tuple[Solution, ...]:
    """Leave out every plan that another beats in both peak and time."""
    found.sort(key=lambda s: (s.simulation.peak_bytes, s.simulation.seconds))
    kept: list[Solution] = []
    for solution in found:
        if not kept or solution.simulation.seconds < kept[-1].simulation.seconds:
            kept.append(solution)
    return tuple(kept)

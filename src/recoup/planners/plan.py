"""The front door: from a budget in bytes to the fastest plan known that fits."""

from time import perf_counter

from recoup.core.graph import Graph
from recoup.core.segments import Action, Segment
from recoup.core.simulation import Simulation, simulate
from recoup.planners.blocks import blocks_of
from recoup.planners.infeasible import infeasible
from recoup.planners.one_level import OneLevel
from recoup.planners.solution import Solution

EXACT = frozenset({Action.KEEP, Action.OFFLOAD})
"""The actions that leave every gradient as it is."""


def plan(
    graph: Graph, budget_bytes: int, *, allow: frozenset[Action] = EXACT
) -> Solution:
    """Return the fastest plan known whose peak is within a budget.

    Args:
        graph: One step, as measured.
        budget_bytes: The most bytes that may be in use at any moment.
        allow: What may be done with a value besides recomputing it.

    Raises:
        InfeasibleError: No plan known fits; it names the smallest budget that does.

    Costs under 2 seconds for 100 blocks of 25 operators.

    Examples:
        >>> from recoup.core.graph import Graph
        >>> plan(Graph((), 0, (), (), (), (), ()), 0).segments
        ()
    """
    started = perf_counter()
    plain = simulate(graph, ())
    if plain.peak_bytes <= budget_bytes:
        return _solution((), plain, "store_all", started)
    level = OneLevel(graph, blocks_of(graph), allow)
    found = level.solve(budget_bytes)
    if found is None:
        floor = level.floor()
        segments = tuple(s for option in floor.options for s in option.segments)
        raise infeasible(graph, budget_bytes, segments)
    segments = tuple(s for option in found.options for s in option.segments)
    return _solution(segments, simulate(graph, segments), "one_level", started)


def _solution(
    segments: tuple[Segment, ...], costs: Simulation, planner: str, started: float
) -> Solution:
    return Solution(
        segments, costs, planner=planner, seconds_planning=perf_counter() - started
    )

"""The entry point: from a budget in bytes to the fastest known plan that fits."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from recoup.core.graph import Graph
from recoup.core.segments import Action
from recoup.core.simulation import simulate
from recoup.core.units import parse_budget
from recoup.errors import InfeasibleError, UsageError
from recoup.planners.infeasible import in_units_of, infeasible
from recoup.planners.search import FoundPlan, Search
from recoup.planners.solution import Solution

EXACT = frozenset({Action.KEEP, Action.OFFLOAD})
"""The actions that leave every gradient unchanged."""


def plan(
    graph: Graph, budget_bytes: str | float, *, allow: frozenset[Action] = EXACT
) -> Solution:
    """Return the fastest known plan whose peak is within a budget.

    For several budgets of one graph, `plan_with` and one search are faster, and never
    slower for more memory. Separate calls share nothing: of two neighbouring budgets
    the larger one may get a plan that is some tenths of a percent slower
    (docs/design/planning.md).

    Args:
        graph: One step, as measured.
        budget_bytes: The most bytes that may be in use at any moment, as a number or a
            text such as "8GiB"; or a share of the plain peak, as 0.6 or "60%".
        allow: Actions allowed on a value besides recomputing it.

    Raises:
        InfeasibleError: No known plan fits; it names the smallest budget that does.
        UsageError: The graph or the budget is not one.

    Costs a second or two for 100 blocks of 25 operators.

    Examples:
        >>> from recoup.core.graph import Graph
        >>> plan(Graph((), 0, (), (), (), (), ()), 0).segments
        ()
    """
    if not isinstance(graph, Graph):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            f"expected the Graph of a measured step, got {type(graph).__name__}; "
            "measure one with recoup.measure."
        )
    search = Search(graph, allow)
    # A step that uses no memory has a peak of 0 bytes, a valid budget then.
    budget = 0 if budget_bytes == 0 else parse_budget(budget_bytes)
    if isinstance(budget, float):
        budget = int(budget * search.plain_bytes)
    try:
        return plan_with(search, budget)
    except InfeasibleError as error:
        raise in_units_of(error, budget_bytes, search.plain_bytes) from None


def plan_with(
    search: Search, budget_bytes: int, *, until: float | None = None
) -> Solution:
    """Return the fastest plan that a search knows or finds within a budget.

    Args:
        search: The search for the step, with its known plans.
        budget_bytes: The most bytes that may be in use at any moment.
        until: The reading of `time.perf_counter` after which any plan that fits is
            accepted; no long computation begins after it.

    Raises:
        InfeasibleError: No known plan fits; it names the smallest budget that does.
    """
    found: list[Solution] = []
    for each in search.passes:
        started = perf_counter()
        plan, bound = _solve(each, budget_bytes, until)
        if plan is None:
            raise infeasible_with_search(search, budget_bytes)
        found.append(_solution(plan, bound, started))
    return joined(found)


def infeasible_with_search(search: Search, budget_bytes: int) -> InfeasibleError:
    """Return the error for a budget below the floor, for the pass that needs most."""
    most = max(search.passes, key=lambda each: each.floor.costs.peak_bytes)
    return infeasible(most.graph, budget_bytes, most.floor.segments)


def with_times_of(solution: Solution, graph: Graph) -> Solution:
    """Return a plan with its costs in the same step with other times."""
    return joined(
        [
            replace(each, simulation=simulate(known, each.segments), others=())
            for each, known in zip(solution.passes, graph.passes, strict=True)
        ]
    )


def joined(passes: Sequence[Solution]) -> Solution:
    """Return the plan of a step from those of its passes."""
    main, *others = passes
    planning = sum(each.seconds_planning for each in passes)
    return replace(main, seconds_planning=planning, others=tuple(others))


def plan_beside(search: Search, budget_bytes: int, known: Solution) -> Solution:
    """Return the fastest plan that a search knows, or finds for another host speed.

    Faster than `plan_with`: it replans only for the host's time.
    """
    return _plan_by(Search.solve_for_host, search, budget_bytes, known)


def plan_by_calls(
    search: Search, budget_bytes: int, known: Solution
) -> Solution | None:
    """Return a plan like a known one that repeats whole calls; None: none fits."""
    found = _plan_by(Search.solve_by_calls, search, budget_bytes, known)
    return found if found.plans != known.plans else None


def _plan_by(
    solve: Callable[[Search, int], FoundPlan | None],
    search: Search,
    budget_bytes: int,
    known: Solution,
) -> Solution:
    solutions: list[Solution] = []
    for each, before in zip(search.passes, known.passes, strict=True):
        started = perf_counter()
        found = solve(each, budget_bytes)
        solutions.append(
            replace(before, others=())
            if found is None
            else _solution(found, before.bound_seconds, started)
        )
    return joined(solutions)


def floor(graph: Graph, *, allow: frozenset[Action] = EXACT) -> Solution:
    """Return the plan with the minimum peak that the planners find.

    Examples:
        >>> floor(Graph((), 0, (), (), (), (), ())).simulation.peak_bytes
        0
    """
    return floor_with(Search(graph, allow))


def floor_with(search: Search) -> Solution:
    """Return the plan with the minimum peak that a search finds."""
    floors = [_solution(each.floor, 0.0, perf_counter()) for each in search.passes]
    return joined(floors)


def frontier(
    graph: Graph,
    *,
    points: int = 12,
    allow: frozenset[Action] = EXACT,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Solution, ...]:
    """Return plans from the minimum peak to that of plain training.

    They are Pareto-optimal: more memory never takes more time.

    Args:
        graph: One step, as measured.
        points: The number of budgets to plan for, evenly spread.
        allow: Actions allowed on a value besides recomputing it.
        progress: Progress callback: budgets done, and their total.

    Examples:
        >>> len(frontier(Graph((), 0, (), (), (), (), ())))
        1
    """
    check_points(points)
    return frontier_with(Search(graph, allow), points=points, progress=progress)


def check_points(points: int) -> None:
    """Raise `UsageError` unless it is a valid number of budgets."""
    given: Any = points  # callers may pass any type
    is_number = isinstance(given, int) and not isinstance(given, bool)
    if not is_number or points < 1:
        raise UsageError(f"expected points of at least 1, got {points!r}.")


def frontier_with(
    search: Search,
    *,
    points: int = 12,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Solution, ...]:
    """Return plans from the minimum peak to that of plain training.

    Plans that the search found before are included if they are Pareto-optimal.
    """
    started = perf_counter()
    lowest, highest = search.floor_bytes, search.plain_bytes
    step = (highest - lowest) / max(points - 1, 1)
    budgets = sorted({int(lowest + step * n) for n in range(points)} | {highest})
    bounds: dict[tuple[int, int], float] = {}
    for done, budget_bytes in enumerate(budgets):
        if progress is not None:
            progress(done, len(budgets))
        for number, each in enumerate(search.passes):
            _, bounds[budget_bytes, number] = _solve(each, budget_bytes)
    found: list[Solution] = []
    for budget_bytes in budgets:
        solutions: list[Solution] = []
        for number, each in enumerate(search.passes):
            best = each.best(budget_bytes) or each.floor
            bound = bounds[budget_bytes, number]
            solutions.append(_solution(best, bound, started))
        whole = joined(solutions)
        if not found or whole.seconds < found[-1].seconds:
            found.append(whole)
    return tuple(found)


def _solve(
    search: Search, budget_bytes: int, until: float | None = None
) -> tuple[FoundPlan | None, float]:
    bound = 0.0
    if search.known[0].costs.peak_bytes > budget_bytes:
        bound = search.bound_seconds(budget_bytes)
    return search.solve(budget_bytes, bound, until=until), bound


def _solution(found: FoundPlan, bound_seconds: float, started: float) -> Solution:
    segments, costs, planner = found
    seconds_planning = perf_counter() - started
    return Solution(segments, costs, bound_seconds, planner, seconds_planning)

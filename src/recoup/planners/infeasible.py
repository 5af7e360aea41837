"""The error when no plan fits: the floor, where its peak is, and what holds it."""

import math
from collections.abc import Sequence
from typing import Any

from recoup.core.graph import Graph, module_paths, next_needed
from recoup.core.segments import Segment
from recoup.core.simulation import simulate
from recoup.core.units import parse_budget, print_bytes
from recoup.errors import InfeasibleError

_SHOWN = 3


def infeasible(
    graph: Graph, budget_bytes: int, floor: Sequence[Segment]
) -> InfeasibleError:
    """Return the error for a budget below the peak of the smallest plan."""
    costs = simulate(graph, floor)
    moment = costs.peak_moment
    holders = _holders(graph, floor, moment)
    held = "; ".join(f"{name} {print_bytes(size)}" for name, size in holders[:_SHOWN])
    asked, needed = print_bytes(budget_bytes), print_bytes(costs.peak_bytes)
    if asked == needed:  # they differ by less than is printed
        asked, needed = f"{budget_bytes} B", f"{costs.peak_bytes} B"
    reason = (
        f"the smallest plan known takes {needed}, {_place(graph, moment)}. "
        f"In use there: {held}."
    )
    advice = "or a smaller batch, or smaller blocks."
    if graph.other_bytes[moment] > budget_bytes:
        # No plan changes these bytes, and blocks have no part in them.
        advice = "or fewer trainable parameters, a smaller dtype or optimizer state."
    return InfeasibleError(
        f"a budget of {asked} cannot be met: {reason} Give it {costs.peak_bytes} "
        f"bytes, {advice}",
        advice=advice,
        budget_bytes=budget_bytes,
        floor_bytes=costs.peak_bytes,
        reason=reason,
        moment=moment,
        holders=holders,
    )


def in_units_of(
    error: InfeasibleError, budget: str | float | None, plain_peak_bytes: int
) -> InfeasibleError:
    """Return the error in shares of the plain peak if the budget was one.

    Examples:
        >>> error = InfeasibleError("no.", budget_bytes=1, floor_bytes=7, reason="Why.")
        >>> str(in_units_of(error, 0.1, 10))[:52]
        'a budget of 10% of the plain peak (1 B) cannot be me'
        >>> in_units_of(error, "1 B", 10) is error
        True
    """
    share = None if budget in (None, 0) else parse_budget(budget)
    if not isinstance(share, float) or error.floor_bytes > plain_peak_bytes:
        return error
    tenths = math.ceil(1000 * error.floor_bytes / plain_peak_bytes)
    while int(tenths / 1000 * plain_peak_bytes) < error.floor_bytes:
        tenths += 1  # shares are rounded down to bytes
    message = (
        f"a budget of {100 * share:g}% of the plain peak "
        f"({print_bytes(error.budget_bytes)}) cannot be met: {error.reason} Give it "
        f"{tenths / 10:g}% ({error.floor_bytes} bytes), {error.advice}"
    )
    return reworded(error, message.strip())


def reworded(error: InfeasibleError, message: str, **changes: Any) -> InfeasibleError:
    """Return an error with another message, or of another budget."""
    names = ("advice", "budget_bytes", "floor_bytes", "reason", "moment", "holders")
    known = {name: getattr(error, name) for name in names}
    return InfeasibleError(message, **known | changes)


def _place(graph: Graph, moment: int) -> str:
    """Return the position of a moment in the step, in words."""
    paths = module_paths(graph)
    if moment < len(graph.operations):
        return f"in forward, at {_named(graph, paths, moment)}"
    producer = next_needed(graph)[moment]
    if producer is None:
        return "at the end of backward"
    return f"in backward, before using the result of {_named(graph, paths, producer)}"


def _named(graph: Graph, paths: Sequence[str], operation: int) -> str:
    """Return an operator as a user knows it: `addmm in h.3.mlp`."""
    name = graph.operations[operation].name
    name = name.removeprefix("aten.").removesuffix(".default")
    return f"{name} in {paths[operation] or 'the step'}"


def _holders(
    graph: Graph, floor: Sequence[Segment], moment: int
) -> tuple[tuple[str, int], ...]:
    """Return the names and bytes in use at a moment of a plan, largest first."""
    half = len(graph.operations)
    costs = simulate(graph, floor)
    found: dict[str, int] = {}
    other_bytes = graph.other_bytes[moment]
    if other_bytes:
        name = "parameters, gradients, optimizer state and workspace"
        found[name] = other_bytes
    for replay in costs.replays:
        if replay.moment == moment:
            start = graph.boundaries[replay.segment.start].module or "the model"
            found[f"recomputing from {start}"] = replay.peak_bytes
    rest = costs.bytes_at[moment] - sum(found.values())
    name = (
        "temporaries of forward and values saved for backward"
        if moment < half
        else "values saved for backward"
    )
    if rest > 0:
        found[name] = rest
    return tuple(sorted(found.items(), key=lambda item: -item[1]))

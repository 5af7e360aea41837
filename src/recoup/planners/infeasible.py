"""The answer when nothing fits: how much would, where the peak is, what holds it."""

from collections.abc import Sequence

from recoup.core.graph import Boundary, Graph
from recoup.core.segments import Segment
from recoup.core.simulation import simulate
from recoup.core.units import print_bytes
from recoup.errors import InfeasibleError

_SHOWN = 3


def infeasible(
    graph: Graph, budget_bytes: int, floor: Sequence[Segment]
) -> InfeasibleError:
    """Return the error for a budget below what the smallest plan takes."""
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
    return InfeasibleError(
        f"a budget of {asked} cannot be met: {reason} Give it {costs.peak_bytes} "
        "bytes, or a smaller batch, or smaller blocks.",
        budget_bytes=budget_bytes,
        floor_bytes=costs.peak_bytes,
        reason=reason,
        moment=moment,
        holders=holders,
    )


def _place(graph: Graph, moment: int) -> str:
    """Return where in the step a moment is, in words."""
    half = len(graph.operations)
    if moment < half:
        label = _label_before(graph, moment)
        return f"in forward at {graph.operations[moment].name} after {label}"
    needed = [save for save in graph.saves if save.used >= moment]
    if not needed:
        return "at the end of backward"
    save = min(needed, key=lambda save: save.used)
    producer = graph.values[save.value].producer
    number = next(n for n, other in enumerate(graph.saves) if other is save)
    before = [b for b in graph.boundaries if b.saves <= number]
    name = graph.operations[producer].name if producer >= 0 else "an input"
    return f"in backward where what {name} made is needed, after {_last(before)}"


def _label_before(graph: Graph, moment: int) -> str:
    return _last([b for b in graph.boundaries if b.operation <= moment])


def _last(boundaries: Sequence[Boundary]) -> str:
    return boundaries[-1].label if boundaries else "the start"


def _holders(
    graph: Graph, floor: Sequence[Segment], moment: int
) -> tuple[tuple[str, int], ...]:
    """Return what is in use at a moment of a plan, largest first."""
    half = len(graph.operations)
    costs = simulate(graph, floor)
    found: dict[str, int] = {}
    other_bytes = graph.other_bytes[moment]
    if other_bytes:
        name = "parameters, gradients, optimizer state and workspace"
        found[name] = other_bytes
    for replay in costs.replays:
        if replay.moment == moment:
            start = graph.boundaries[replay.segment.start].label
            found[f"the replay from {start}"] = replay.peak_bytes
    rest = costs.bytes_at[moment] - sum(found.values())
    name = (
        "what forward still reads and holds for backward"
        if moment < half
        else "what segments hold for backward"
    )
    if rest > 0:
        found[name] = rest
    return tuple(sorted(found.items(), key=lambda item: -item[1]))

"""Recompute the blocks that free most bytes per second, until the budget is met."""

from recoup.core.footprint import footprint
from recoup.core.graph import Graph
from recoup.core.segments import Segment
from recoup.core.simulation import simulate
from recoup.planners.blocks import blocks_of


def greedy(graph: Graph, budget_bytes: int) -> tuple[Segment, ...]:
    """Return segments for the best blocks, as few as meet the budget.

    Whole blocks are ranked by the bytes that autograd saves in them for each second of
    recomputing. If even all of them do not meet the budget, all are returned. Costs one
    simulation for each doubling of the number of blocks.

    Examples:
        >>> greedy(Graph((), 0, (), (), (), (), ()), 100)
        ()
    """
    ranked = sorted(
        blocks_of(graph), key=lambda block: -_bytes_per_second(graph, block)
    )

    def first(count: int) -> tuple[Segment, ...]:
        return tuple(Segment(start, stop) for start, stop in sorted(ranked[:count]))

    low, high = 0, len(ranked)
    while low < high:
        middle = (low + high) // 2
        if simulate(graph, first(middle)).peak_bytes <= budget_bytes:
            high = middle
        else:
            low = middle + 1
    return first(high)


def _bytes_per_second(graph: Graph, block: tuple[int, int]) -> float:
    saved = {
        graph.values[save.value].storage
        for save in graph.saves_between(*block)
        if graph.values[save.value].producer in graph.operations_between(*block)
    }
    saved_bytes = sum(graph.storages[storage].bytes for storage in saved)
    replays = footprint(graph, Segment(*block)).replays
    return saved_bytes / (sum(replay.seconds for replay in replays) or 1e-12)

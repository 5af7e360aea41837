"""Common checkpointing rules, block by block: the baselines of planners."""

import itertools
import math
from bisect import bisect_left

from recoup.core.footprint import footprint
from recoup.core.graph import Graph
from recoup.core.segments import Segment, within_runs
from recoup.core.simulation import simulate
from recoup.errors import UsageError


def blocks_of(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Return the boundaries of each block, as pairs.

    A graph without blocks is one block from its first boundary to its last. Operations
    between two calls of the model are in no block.

    Examples:
        >>> from recoup.core.graph import Boundary
        >>> places = tuple(Boundary(0, 0) for _ in range(5))
        >>> blocks_of(Graph((), 0, (), (), (), places, (), blocks=(0, 2, 4)))
        ((0, 2), (2, 4))
        >>> blocks_of(Graph((), 0, (), (), (), places, ()))
        ((0, 4),)
    """
    marks = graph.blocks
    if len(marks) < 2:
        marks = (0, len(graph.boundaries) - 1) if len(graph.boundaries) > 1 else ()
    return tuple(
        (start, stop)
        for start, stop in itertools.pairwise(marks)
        if graph.is_within_run(start, stop)
    )


def store_all(graph: Graph) -> tuple[Segment, ...]:
    """Return the plan of plain autograd: no segments, nothing is recomputed."""
    del graph  # the same result for all
    return ()


def recompute_all(graph: Graph) -> tuple[Segment, ...]:
    """Return one segment for each block, in which nothing is kept.

    It costs about one more forward, and the memory of all block inputs and of one
    block.
    """
    return every_kth(graph, 1)


def every_kth(graph: Graph, k: int = 2) -> tuple[Segment, ...]:
    """Return one segment for the first of every `k` blocks; the others are kept.

    Raises:
        UsageError: `k` is not positive.

    Examples:
        >>> from recoup.core.graph import Boundary
        >>> places = tuple(Boundary(0, 0) for _ in range(5))
        >>> graph = Graph((), 0, (), (), (), places, (), blocks=(0, 1, 2, 3, 4))
        >>> [(segment.start, segment.stop) for segment in every_kth(graph, 2)]
        [(0, 1), (2, 3)]
    """
    if k < 1:
        raise UsageError(f"expected k to be at least 1, got {k}.")
    return tuple(Segment(start, stop) for start, stop in blocks_of(graph)[::k])


def square_root(graph: Graph) -> tuple[Segment, ...]:
    """Return segments of about the square root of the number of blocks each.

    It costs about one more forward, and memory in proportion to the square root of
    the depth (Chen et al., 2016).

    Examples:
        >>> from recoup.core.graph import Boundary
        >>> places = tuple(Boundary(0, 0) for _ in range(10))
        >>> graph = Graph((), 0, (), (), (), places, (), blocks=tuple(range(10)))
        >>> [(segment.start, segment.stop) for segment in square_root(graph)]
        [(0, 3), (3, 6), (6, 9)]
    """
    blocks = blocks_of(graph)
    length = max(1, math.isqrt(len(blocks)))
    groups = [blocks[i : i + length] for i in range(0, len(blocks), length)]
    segments = [Segment(group[0][0], group[-1][1]) for group in groups]
    return within_runs(graph, segments)


def greedy(graph: Graph, budget_bytes: int) -> tuple[Segment, ...]:
    """Return segments for the best blocks, as few as meet the budget.

    Whole blocks are ranked by saved bytes per second of recomputation. If even all of
    them do not meet the budget, all are returned. Costs one simulation for each
    doubling of the number of blocks.
    """
    ranked = sorted(
        blocks_of(graph), key=lambda block: -_bytes_per_second(graph, block)
    )

    def first(count: int) -> tuple[Segment, ...]:
        return tuple(Segment(start, stop) for start, stop in sorted(ranked[:count]))

    def fits(count: int) -> bool:
        return simulate(graph, first(count)).peak_bytes <= budget_bytes

    return first(bisect_left(range(len(ranked)), True, key=fits))


def _bytes_per_second(graph: Graph, block: tuple[int, int]) -> float:
    saved = {
        graph.values[save.value].storage
        for save in graph.saves_between(*block)
        if graph.values[save.value].producer in graph.operations_between(*block)
    }
    saved_bytes = sum(graph.storages[storage].bytes for storage in saved)
    replays = footprint(graph, Segment(*block)).replays
    return saved_bytes / (sum(replay.seconds for replay in replays) or 1e-12)

"""Recompute every k-th block."""

from recoup.core.graph import Graph
from recoup.core.segments import Segment
from recoup.errors import UsageError
from recoup.planners.blocks import blocks_of


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
        raise UsageError(f"every k-th block needs a k of at least 1: got {k}.")
    return tuple(Segment(start, stop) for start, stop in blocks_of(graph)[::k])

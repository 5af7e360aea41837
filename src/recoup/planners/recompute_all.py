"""Recompute every block from its input."""

from recoup.core.graph import Graph
from recoup.core.segments import Segment
from recoup.planners.blocks import blocks_of


def recompute_all(graph: Graph) -> tuple[Segment, ...]:
    """Return one segment for each block, in which nothing is kept.

    It costs about one more forward, and the memory of all block inputs and of one
    block.

    Examples:
        >>> from recoup.core.graph import Boundary
        >>> places = tuple(Boundary(0, 0) for _ in range(3))
        >>> graph = Graph((), 0, (), (), (), places, (), blocks=(0, 1, 2))
        >>> [(segment.start, segment.stop) for segment in recompute_all(graph)]
        [(0, 1), (1, 2)]
    """
    return tuple(Segment(start, stop) for start, stop in blocks_of(graph))

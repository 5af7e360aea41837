"""Chen's rule: about as many segments as each has blocks."""

import math

from recoup.core.call_order import within_calls
from recoup.core.graph import Graph
from recoup.core.segments import Segment
from recoup.planners.blocks import blocks_of


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
    return within_calls(graph, segments)

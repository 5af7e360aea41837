"""The blocks of a graph: the stretches that planners start from."""

import itertools

from recoup.core.graph import Graph


def blocks_of(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Return the boundaries of each block, as pairs.

    A graph without blocks is one block from its first boundary to its last. What lies
    between two calls of the model is no block.

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
        if graph.is_within_call(start, stop)
    )

"""Keep everything: plain autograd."""

from recoup.core.graph import Graph
from recoup.core.segments import Segment


def store_all(graph: Graph) -> tuple[Segment, ...]:
    """Return the plan without segments: nothing is recomputed, all memory is used.

    Examples:
        >>> store_all(Graph((), 0, (), (), (), (), ()))
        ()
    """
    del graph  # the same answer for all
    return ()

"""Actions and segments that save nothing: plans do without them."""

from recoup.core.footprint import footprint
from recoup.core.graph import Graph
from recoup.core.segments import Segment


def without_idle_actions(graph: Graph, segment: Segment) -> Segment:
    """Return the segment without actions on values that nothing starts from.

    Neither backward nor a replay needs these, but a region would hold them. What the
    segment costs stays the same.

    Examples:
        >>> from recoup.core.graph import Boundary
        >>> from recoup.core.segments import Action
        >>> segment = Segment(0, 1, {3: Action.KEEP})
        >>> places = (Boundary(0, 0), Boundary(0, 0))
        >>> empty = Graph((), 0, (), (), (), places, ())
        >>> without_idle_actions(empty, segment).actions
        {}
    """
    starts = iter(footprint(graph, segment).starts)

    def rebuilt(segment: Segment) -> Segment:
        inner = tuple(rebuilt(child) for child in segment.inner)
        _, roots = next(starts)
        used = set(roots)
        actions = {v: a for v, a in segment.actions.items() if v in used}
        return Segment(segment.start, segment.stop, actions, inner)

    return rebuilt(segment)


def is_idle(graph: Graph, segment: Segment) -> bool:
    """Return whether a segment runs nothing again and moves nothing to the host.

    Then it holds all that autograd would, for as long or longer, and records in vain.

    Examples:
        >>> from recoup.core.graph import Boundary
        >>> places = (Boundary(0, 0), Boundary(0, 0))
        >>> is_idle(Graph((), 0, (), (), (), places, ()), Segment(0, 1))
        True
    """
    inside = graph.operations_between(segment.start, segment.stop)
    if any(graph.values[one.value].producer in inside for one in graph.dropped):
        return False  # autograd would hold what nobody asks for
    found = footprint(graph, segment)
    return not found.replays and not found.offloads

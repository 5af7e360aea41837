"""A plan located in a measured step: from names of places back to segments."""

from collections import Counter
from collections.abc import Mapping

from recoup.core.graph import Graph
from recoup.core.plan import Place, Plan, Span
from recoup.core.segments import Action, Segment
from recoup.errors import PlanError


def locate(graph: Graph, plan: Plan) -> tuple[Segment, ...]:
    """Return the segments of a measured step that a plan describes.

    It is the way back from `plan_for`. Costs time in proportion to the operators.

    Raises:
        PlanError: The step has no such place.

    Examples:
        >>> from recoup.core.graph import Boundary
        >>> from recoup.core.plan import plan_for
        >>> places = (Boundary(0, 0, "a"), Boundary(0, 0, "b"))
        >>> graph = Graph((), 0, (), (), (), places, ())
        >>> locate(graph, plan_for(graph, [Segment(0, 1)]))
        (Segment(start=0, stop=1, actions={}, inner=()),)
    """
    places = {
        Place(b.module, b.call, b.entering): number
        for number, b in enumerate(graph.boundaries)
    }
    return tuple(_segment(graph, span, places) for span in plan.spans)


def _segment(graph: Graph, span: Span, places: Mapping[Place, int]) -> Segment:
    start, stop = _number(span.start, places), _number(span.stop, places)
    if start >= stop:
        raise PlanError(
            f"the plan has a span from '{span.start.label}' to '{span.stop.label}', "
            "which come in another order in this step. Make a plan for this model."
        )
    return Segment(
        start,
        stop,
        actions=_actions(graph, span, range(start, stop)),
        inner=tuple(_segment(graph, inner, places) for inner in span.inner),
    )


def _number(place: Place, places: Mapping[Place, int]) -> int:
    if place not in places:
        raise PlanError(
            f"the plan speaks of '{place.label}', where this step can not be cut. "
            "Make a plan for this model with recoup.fit."
        )
    return places[place]


def _actions(graph: Graph, span: Span, boundaries: range) -> dict[int, Action]:
    wanted = {(held.operator, held.nth): held.action for held in span.held}
    found: dict[int, Action] = {}
    seen: Counter[str] = Counter()
    for number in graph.operations_between(boundaries.start, boundaries.stop):
        operation = graph.operations[number]
        if not operation.replayable:
            continue
        for value in operation.makes:
            action = wanted.get((operation.name, seen[operation.name]))
            seen[operation.name] += 1
            if action is not None:
                found[value] = action
    return found

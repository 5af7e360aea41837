"""The order in which a call reaches the places of its plan."""

from collections.abc import Sequence

from recoup.core.graph import Graph
from recoup.core.plan import Place, Plan, displaced, measured_order


class CallOrders:
    """Compares calls with the measured one, plan by plan.

    Args:
        graph: The measured step.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        # With the plan, so that its identity is not given to another.
        self._known: dict[int, tuple[Plan, tuple[Place, ...]]] = {}

    def forget(self) -> None:
        """Forget the plans: there are others."""
        self._known.clear()

    def displaced_spans(self, plan: Plan, order: Sequence[Place]) -> list[int] | None:
        """Return the spans that did not begin as measured; None: all is as measured."""
        if id(plan) not in self._known:
            self._known[id(plan)] = (plan, measured_order(self._graph, plan))
        measured = self._known[id(plan)][1]
        # The end of the call closes what is open: it is not reached as a place.
        if _inside(plan, measured) == _inside(plan, order):
            return None
        return list(displaced(plan, measured, order))


def _inside(plan: Plan, order: Sequence[Place]) -> list[Place]:
    """Return the places that are not the end of a call of the step's own."""
    roots = plan.roots
    return [place for place in order if place.entering or place.module not in roots]

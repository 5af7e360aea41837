"""What partitions of one step know in common: what its stretches cost."""

from recoup.core.footprint import Innermost
from recoup.core.graph import Graph
from recoup.planners.alike import Part
from recoup.planners.cut import Demand, frontier_of
from recoup.planners.flat import Costs, Mentions

_SETS = 16
_LONG = 1000


class Memory:
    """What is known of the stretches of a step.

    Several partitions of one step, or of the same step with other times, share one:
    bytes do not depend on times.
    """

    def __init__(self) -> None:
        self.costs: dict[object, Costs] = {}
        self.innermost: Innermost = {}
        self._signatures: dict[object, int] = {}
        self._stretches: dict[tuple[int, int], tuple[Part, int]] = {}
        self._mentions: Mentions | None = None
        self._held_sets: list[tuple[Graph, int, int, list[frozenset[int]]]] = []

    def held_sets(self, graph: Graph, first: int, last: int) -> list[frozenset[int]]:
        """Return what is worth holding at several prices of a byte, all in one stretch.

        These depend on times: each graph has its own.
        """
        for known, *ends, found in self._held_sets:
            if known is graph and ends == [first, last]:
                return found
        found = _held_sets(graph, first, last)
        self._held_sets.append((graph, first, last, found))
        return found

    def stretch(self, graph: Graph, first: int, last: int) -> tuple[Part, int]:
        """Return a stretch, and a number that it shares with those that look alike."""
        found = self._stretches.get((first, last))
        if found is None:
            stretch = Part(graph, first, last)
            number = self._signatures.setdefault(
                stretch.signature(), len(self._signatures)
            )
            found = self._stretches[first, last] = stretch, number
        return found

    def mentions(self, graph: Graph) -> Mentions:
        """Return what operators mention."""
        if self._mentions is None:
            self._mentions = Mentions(graph)
        return self._mentions


def _held_sets(graph: Graph, first: int, last: int) -> list[frozenset[int]]:
    """Return what is worth holding at several prices of a byte, all in one stretch."""
    inside = graph.operations_between(first, last)
    saved = dict.fromkeys(
        save.value
        for save in graph.saves_between(first, last)
        if graph.values[save.value].producer in inside
    )
    half = len(graph.operations)
    free: dict[int, int] = {}
    for number in inside:
        operation = graph.operations[number]
        for value in (*operation.reads, *operation.makes):
            storage = graph.storages[graph.values[value].storage]
            if graph.values[value].producer not in inside or storage.dies >= half:
                free[value] = 0
    limit = _SETS if len(inside) < _LONG else _SETS // 2
    choices = frontier_of(Demand(graph, inside, tuple(saved), free), limit=limit)
    return [choice.held for choice in choices]

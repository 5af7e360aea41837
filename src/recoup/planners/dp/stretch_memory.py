"""Stretches of forward, and what partitions of one step know about them in common."""

import numpy as np

from recoup.core.batch_footprint import Costs, Mentions
from recoup.core.footprint import Innermost
from recoup.core.graph import BEFORE, Graph, Integers
from recoup.core.segments import Segment
from recoup.planners.cut.min_cut import demand_between, frontier_of

_SETS = 16
_LONG = 1000


class Part:
    """What lies between two boundaries, and what tells it from other stretches.

    Args:
        graph: The step.
        first: Where it begins.
        last: Where it ends.
    """

    def __init__(self, graph: Graph, first: int, last: int) -> None:
        self.graph = graph
        self.first = first
        self.last = last
        self.inside = graph.operations_between(first, last)
        self.saves = graph.saves_between(first, last)
        half = len(graph.operations)
        self.begins = min((save.used for save in self.saves), default=half)
        self.ends = max((save.released for save in self.saves), default=half - 1)
        self.rows: Integers = np.concatenate(
            [
                np.arange(self.inside.start, self.inside.stop),
                np.arange(self.begins, self.ends + 1),
            ]
        )
        self.names: dict[int, int] = {}
        self.crossing = _crossing(graph, self.inside)

    def signature(self) -> object:
        """Return what is equal for stretches of which all ways cost the same memory.

        Times are not in it: those of equal operators are taken to be equal.
        """
        graph, names, begins = self.graph, self.names, self.begins
        wiring: list[object] = []
        for number in self.inside:
            operation = graph.operations[number]
            wiring.append(
                (
                    operation.name,
                    operation.replayable,
                    operation.workspace_bytes,
                    operation.state_bytes,
                    *[names.setdefault(v, len(names)) for v in operation.reads],
                    BEFORE,
                    *[names.setdefault(v, len(names)) for v in operation.makes],
                )
            )
        saved = [
            (
                names.setdefault(save.value, len(names)),
                save.used - begins,
                save.released - begins,
                save.replayed_until - begins,
            )
            for save in self.saves
        ]
        storages: dict[int, int] = {}
        values = [self._look(value, storages) for value in names]
        own = graph.own_bytes[begins : self.ends + 1]
        return tuple(wiring), tuple(saved), tuple(values), own

    def shape_of(self, segment: Segment) -> tuple[object, ...]:
        """Return where a segment and those inside it begin and end, in the stretch."""
        return (
            *self._place(segment.start),
            *self._place(segment.stop),
            *(self.shape_of(inner) for inner in segment.inner),
        )

    def _place(self, boundary: int) -> tuple[int, int]:
        graph = self.graph
        here, first = graph.boundaries[boundary], graph.boundaries[self.first]
        return here.operation - first.operation, here.saves - first.saves

    def _look(self, value: int, storages: dict[int, int]) -> tuple[object, ...]:
        graph, inside = self.graph, self.inside
        found = graph.values[value]
        storage = graph.storages[found.storage]
        name = storages.setdefault(found.storage, len(storages))
        if storage.born not in inside:
            # What comes from outside costs nothing here, unless it must be copied.
            spoilt_bytes = 0 if found.holdable else storage.bytes
            return name, found.producer in inside, spoilt_bytes
        dies: object = "later"
        if storage.dies < inside.stop:
            dies = storage.dies - inside.start
        elif storage.dies >= len(graph.operations):
            dies = ("backward", storage.dies - self.begins)
        return name, found.producer in inside, storage.bytes, found.holdable, dies


def _crossing(graph: Graph, inside: range) -> list[int]:
    """Return the values made in a stretch that are read after it."""
    return [
        value
        for number in inside
        for value in graph.operations[number].makes
        if graph.storages[graph.values[value].storage].dies >= inside.stop
    ]


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
    demand = demand_between(graph, first, last, graph.arrays.dies)
    limit = _SETS if len(demand.inside) < _LONG else _SETS // 2
    return [choice.held for choice in frontier_of(demand, limit=limit)]

"""Parts of forward, and what is equal for those that look alike."""

import numpy as np

from recoup.core.graph import BEFORE, Graph, Integers
from recoup.core.segments import Segment


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

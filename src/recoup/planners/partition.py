"""Where to cut forward: a dynamic programme over the places where segments may begin.

A plan is a path from the first place to the last; a step of it is a stretch, run in one
of a few ways. In backward, when a stretch is replayed, exactly what the earlier ones
hold is there besides: so each label needs two figures only, bytes held and seconds, and
the best are a front.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recoup.core.graph import Graph
from recoup.planners.cut import Demand, frontier_of
from recoup.planners.options import Floats, Integers, Option, Stretch
from recoup.planners.ways import Memory, Way, Ways

Path = tuple[tuple[Stretch, Option], ...]
"""Stretches in order, and what is done with each."""

_LABELS = 128
_SETS = 16
_LONG = 1000


class Partition:
    """All plans over some places.

    Args:
        graph: The step.
        places: Boundaries, in order, where segments may begin and end.
        reach: Over how many places at most a segment goes.
        nest: Whether segments inside others are tried.
        memory: What is known of the stretches of this step already.
    """

    def __init__(
        self,
        graph: Graph,
        places: Sequence[int],
        *,
        reach: int,
        nest: bool = False,
        memory: Memory | None = None,
    ) -> None:
        self.graph = graph
        self.places = tuple(places)
        held_sets = _held_sets(graph, places[0], places[-1])
        ways = Ways(graph, places, held_sets, nest=nest, memory=memory)
        self._highest = ways.natural_bytes + sum(s.bytes for s in graph.storages)
        self._steps: list[list[_Step]] = [[]]
        for stop in range(1, len(places)):
            starts = range(max(0, stop - reach), stop)
            self._steps.append([_Step(n, ways.between(n, stop)) for n in starts])

    def best(self, budget_bytes: int) -> Path | None:
        """Return the fastest path that fits as counted here, or None."""
        fronts: list[_Front] = [_Front.origin()]
        for steps in self._steps[1:]:
            fronts.append(_Front.reached(fronts, steps, budget_bytes))
        if not len(fronts[-1].seconds):
            return None
        return self._walk_back(fronts)

    def lowest(self) -> int:
        """Return the smallest budget for which there is a path, as counted here."""
        low, high = 0, self._highest
        while high - low > max(1, high // 10_000):
            middle = (low + high) // 2
            if self.best(middle) is None:
                low = middle
            else:
                high = middle
        return high

    def _walk_back(self, fronts: Sequence["_Front"]) -> Path:
        label = int(fronts[-1].seconds.argmin())
        stop = len(fronts) - 1
        path: list[tuple[Stretch, Option]] = []
        while stop:
            front = fronts[stop]
            step = self._steps[stop][int(front.step[label])]
            way = step.ways[int(front.way[label])]
            path.append(((self.places[step.start], self.places[stop]), way.make()))
            label, stop = int(front.label[label]), step.start
        return tuple(reversed(path))


class _Step:
    """All ways from one place to another, as arrays."""

    def __init__(self, start: int, ways: Sequence[Way]) -> None:
        self.start = start
        self.ways = ways
        self.held = np.array([way.held_bytes for way in ways], dtype=np.int64)
        self.peak = np.array([way.peak_bytes for way in ways], dtype=np.int64)
        self.seconds = np.array([way.seconds for way in ways], dtype=np.float64)


@dataclass(frozen=True)
class _Front:
    """Labels of one place, none better than another in both figures.

    Attributes:
        held: Bytes held when forward has come so far.
        seconds: What is run again of it.
        step: Which of the steps that lead here was the last.
        way: How that stretch is run.
        label: The label at its start.
    """

    held: Integers
    seconds: Floats
    step: Integers
    way: Integers
    label: Integers

    @staticmethod
    def origin() -> "_Front":
        zero = np.zeros(1, dtype=np.int64)
        return _Front(zero, np.zeros(1), zero, zero, zero)

    @staticmethod
    def reached(
        fronts: Sequence["_Front"], steps: Sequence[_Step], budget_bytes: int
    ) -> "_Front":
        """Return the labels that steps make of those where they start."""
        held: list[Integers] = [np.zeros(0, dtype=np.int64)]
        seconds: list[Floats] = [np.zeros(0)]
        numbers: list[Integers] = [np.zeros(0, dtype=np.int64)]
        ways, labels = list(numbers), list(numbers)
        for number, step in enumerate(steps):
            front = fronts[step.start]
            fits = front.held[:, None] + step.peak <= budget_bytes
            label, way = np.nonzero(fits)
            held.append(front.held[label] + step.held[way])
            seconds.append(front.seconds[label] + step.seconds[way])
            numbers.append(np.full(len(label), number, dtype=np.int64))
            labels.append(label)
            ways.append(way)
        every = _Front(
            np.concatenate(held),
            np.concatenate(seconds),
            np.concatenate(numbers),
            np.concatenate(ways),
            np.concatenate(labels),
        )
        order = np.lexsort((every.seconds, every.held))
        lowest = np.minimum.accumulate(every.seconds[order])
        better = np.concatenate([[True], lowest[1:] < lowest[:-1]])[: len(order)]
        order = order[better]
        if len(order) > _LABELS:
            order = order[np.linspace(0, len(order) - 1, _LABELS).astype(np.int64)]
        return _Front(
            every.held[order],
            every.seconds[order],
            every.step[order],
            every.way[order],
            every.label[order],
        )


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

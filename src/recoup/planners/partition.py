"""Where to cut forward: a dynamic programme over the places where segments may begin.

A plan is a path from the first place to the last; a step of it is a stretch, run in one
of a few ways. In backward, when a stretch is replayed, exactly what the earlier ones
hold is there besides: so each label needs two figures only, bytes held and seconds, and
the best are a front.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from recoup.core.graph import Graph
from recoup.core.segments import Segment
from recoup.planners.cut import Demand, frontier_of
from recoup.planners.options import (
    Floats,
    Integers,
    Option,
    Stretch,
    holding,
    keep_all,
    nested,
)
from recoup.planners.places import Finer
from recoup.planners.profile import Profile
from recoup.planners.recursion import holds, nestings

Path = tuple[tuple[Stretch, Option], ...]
"""Stretches in order, and what is done with each."""

_LABELS = 128
_SETS = 16
_LONG = 1500


@dataclass(frozen=True)
class Way:
    """One way to run a stretch.

    Attributes:
        option: What is done.
        held_bytes: What it holds when forward has ended.
        peak_bytes: The most in use while its backward runs, besides what earlier
            stretches hold.
    """

    option: Option
    held_bytes: int
    peak_bytes: int


class Partition:
    """All plans over some places.

    Args:
        graph: The step.
        places: Boundaries, in order, where segments may begin and end.
        reach: Over how many places at most a segment goes.
        nest: Whether segments inside others are tried.
    """

    def __init__(
        self, graph: Graph, places: Sequence[int], *, reach: int, nest: bool = False
    ) -> None:
        self.graph = graph
        self.places = tuple(places)
        self._profile = Profile(graph)
        self._natural = self._profile.bytes_at([])
        self._finer = Finer(graph)
        self._held_sets = _held_sets(graph, places[0], places[-1])
        self._ways: dict[tuple[int, int], list[Way]] = {}
        for stop in range(1, len(places)):
            for start in range(max(0, stop - reach), stop):
                self._ways[start, stop] = self._make_ways(start, stop, nest=nest)

    def best(self, budget_bytes: int) -> Path | None:
        """Return the fastest path that fits as counted here, or None."""
        fronts: list[_Front] = [_Front.origin()]
        for stop in range(1, len(self.places)):
            front = _Front.merged(
                _extended(fronts[start], start, number, way, budget_bytes)
                for start in range(stop)
                for number, way in enumerate(self._ways.get((start, stop), ()))
            )
            fronts.append(front)
        if not len(fronts[-1].seconds):
            return None
        return self._walk_back(fronts)

    def lowest(self) -> int:
        """Return the smallest budget for which there is a path, as counted here."""
        low, high = (
            0,
            int(self._natural.max(initial=0))
            + sum(storage.bytes for storage in self.graph.storages),
        )
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
            start, number = int(front.start[label]), int(front.way[label])
            stretch = (self.places[start], self.places[stop])
            path.append((stretch, self._ways[start, stop][number].option))
            label, stop = int(front.label[label]), start
        return tuple(reversed(path))

    def _make_ways(self, start: int, stop: int, *, nest: bool) -> list[Way]:
        graph = self.graph
        first, last = self.places[start], self.places[stop]
        inside = graph.operations_between(first, last)
        crossing = _crossing(graph, inside)
        options = [keep_all(graph, first, last)] if stop == start + 1 else []
        sets = {frozenset[int]()}
        for held in self._held_sets:
            sets.add(frozenset(v for v in held if graph.values[v].producer in inside))
        free = [v for v in crossing if graph.values[v].holdable]
        options += [holding(graph, first, last, {*held, *free}) for held in sets]
        for segment in self._nestings(start, stop) if nest else ():
            options += [nested(graph, holds(graph, segment, h)) for h in sets]
        storages = {graph.values[value].storage for value in crossing}
        ways = [self._way(option, first, last, storages) for option in options]
        return _undominated(ways)

    def _nestings(self, start: int, stop: int) -> Iterator[Segment]:
        """Yield segments over a stretch with others inside."""
        first, last = self.places[start], self.places[stop]
        if stop - start > 1:
            yield from nestings(self.places[start : stop + 1])
        if stop - start <= 2:
            for parts in (2, 3, 4):
                inner = self._finer.split(first, last, parts)
                if len(inner) > 2:
                    yield nestings(inner)[0]

    def _way(self, option: Option, first: int, last: int, crossing: set[int]) -> Way:
        """Return what an option takes.

        What is read after the stretch is charged here, once, whoever holds it; what is
        read from before it has been charged there.
        """
        graph, half = self.graph, self._profile.half
        inside = graph.operations_between(first, last)
        until = self._profile.until.copy()
        held = {s for s, released in option.footprint.holds.items() if released >= half}
        held_bytes = 0
        for storage in held | crossing:
            if graph.storages[storage].born not in inside:
                until[storage] = graph.moments
            elif until[storage] < half:
                held_bytes += graph.storages[storage].bytes
        saves = graph.saves_between(first, last)
        begins = min((save.used for save in saves), default=half)
        ends = max((save.released for save in saves), default=half - 1)
        rows = np.concatenate(
            [np.arange(inside.start, inside.stop), np.arange(begins, ends + 1)]
        )
        use = self._profile.use(option, until, rows)
        peak_bytes = int((use + self._natural[rows]).max(initial=0))
        return Way(option, held_bytes, peak_bytes)


def _crossing(graph: Graph, inside: range) -> list[int]:
    """Return the values made in a stretch that are read after it."""
    return [
        value
        for number in inside
        for value in graph.operations[number].makes
        if graph.storages[graph.values[value].storage].dies >= inside.stop
    ]


@dataclass(frozen=True)
class _Front:
    """Labels of one place, none better than another in both figures."""

    held: Integers
    seconds: Floats
    start: Integers
    way: Integers
    label: Integers

    @staticmethod
    def origin() -> "_Front":
        zero = np.zeros(1, dtype=np.int64)
        return _Front(zero, np.zeros(1), zero, zero, zero)

    @staticmethod
    def merged(fronts: Iterable["_Front"]) -> "_Front":
        every = list(fronts)
        columns = [
            np.concatenate([getattr(front, name) for front in every] or [np.zeros(0)])
            for name in ("held", "seconds", "start", "way", "label")
        ]
        held, seconds = columns[:2]
        order = np.lexsort((seconds, held))
        lowest = np.minimum.accumulate(seconds[order])
        better = np.concatenate([[True], lowest[1:] < lowest[:-1]])[: len(order)]
        order = order[better]
        if len(order) > _LABELS:
            order = order[np.linspace(0, len(order) - 1, _LABELS).astype(np.int64)]
        held, seconds, start, way, label = (column[order] for column in columns)
        whole = np.int64
        return _Front(
            held.astype(whole),
            seconds,
            start.astype(whole),
            way.astype(whole),
            label.astype(whole),
        )


def _extended(
    front: _Front, start: int, number: int, way: Way, budget_bytes: int
) -> _Front:
    """Return the labels that a way makes of those where it starts."""
    fit = np.flatnonzero(front.held + way.peak_bytes <= budget_bytes)
    return _Front(
        front.held[fit] + way.held_bytes,
        front.seconds[fit] + way.option.seconds,
        np.full(len(fit), start),
        np.full(len(fit), number),
        fit,
    )


def _undominated(ways: Sequence[Way]) -> list[Way]:
    """Return the ways that no other one beats in all figures."""
    found: list[Way] = []
    for way in sorted(
        ways, key=lambda w: (w.option.seconds, w.held_bytes, w.peak_bytes)
    ):
        if not any(
            other.held_bytes <= way.held_bytes and other.peak_bytes <= way.peak_bytes
            for other in found
        ):
            found.append(way)
    return found


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

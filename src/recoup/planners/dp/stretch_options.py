"""Ways to run a stretch of forward; stretches that look alike are worked out once."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from recoup.core.batch_footprint import Costs, costs_of_holding
from recoup.core.footprint import Innermost
from recoup.core.graph import Graph
from recoup.core.memory_use import MemoryUse
from recoup.core.segments import Segment
from recoup.planners.dp.nesting import holds, nestings
from recoup.planners.dp.places import Finer
from recoup.planners.dp.stretch_memory import Memory, Part
from recoup.planners.option import (
    Option,
    holding,
    keep_all,
    nested,
)

Make = Callable[[], Option]


@dataclass(frozen=True)
class Way:
    """One way to run a stretch.

    Attributes:
        make: Returns what is done.
        seconds: What is run again, and recorded for it.
        held_bytes: What it holds when forward has ended.
        peak_bytes: The most in use while it runs and while its backward does, besides
            what earlier stretches hold.
    """

    make: Make
    seconds: float
    held_bytes: int
    peak_bytes: int


class _Candidate(NamedTuple):
    """Something that may be done with a stretch.

    Attributes:
        key: What tells it from all others that cost something else.
        make: Returns it.
        held: What the stretch holds, if it is one segment with none inside.
    """

    key: object
    make: Make
    held: tuple[int, ...] | None = None


class Ways:
    """Makes the ways to run stretches between places.

    Args:
        graph: The step.
        places: Boundaries, in order.
        held_sets: Sets of values that are worth holding.
        nest: Whether segments inside others are tried.
        memory: What is known already.
    """

    def __init__(
        self,
        graph: Graph,
        places: Sequence[int],
        held_sets: Iterable[Iterable[int]],
        *,
        nest: bool,
        memory: Memory | None = None,
    ) -> None:
        self.graph = graph
        self.places = tuple(places)
        self._nest = nest
        self._memory_use = MemoryUse(graph)
        self._natural = self._memory_use.bytes_at([])
        self._finer = Finer(graph) if nest else None
        self._held_sets = [_by_producer(graph, held) for held in held_sets]
        self._memory = Memory() if memory is None else memory
        self._seconds: dict[object, float] = {}

    @property
    def natural_bytes(self) -> int:
        """The peak if nothing at all were saved."""
        return int(self._natural.max(initial=0))

    def between(self, start: int, stop: int) -> list[Way]:
        """Return the ways to run what is between two places, none worse in all."""
        first, last = self.places[start], self.places[stop]
        if not self.graph.is_within_call(first, last) and stop > start + 1:
            return []
        stretch, signature = self._memory.stretch(self.graph, first, last)
        if not self.graph.is_within_call(first, last):
            # What is in no call of the model is kept.
            keep = partial(keep_all, self.graph, first, last)
            candidates = [_Candidate((signature, "kept"), keep)]
        else:
            candidates = list(self._candidates(stretch, signature, start, stop))
        self._work_out(stretch, candidates)
        return _undominated(self._ways(stretch, candidates))

    def _candidates(
        self, stretch: Part, signature: int, start: int, stop: int
    ) -> Iterator[_Candidate]:
        """Yield what may be done."""
        graph, first, last = self.graph, stretch.first, stretch.last
        if stop == start + 1:
            yield _Candidate((signature, "kept"), partial(keep_all, graph, first, last))
        free = [v for v in stretch.crossing if graph.values[v].holdable]
        sets = dict.fromkeys(
            [(), *(_between(held, stretch.inside) for held in self._held_sets)]
        )
        for held in sets:
            every = tuple(dict.fromkeys([*held, *free]))
            key = (signature, "held", *sorted(stretch.names[v] for v in every))
            yield _Candidate(key, partial(holding, graph, first, last, every), every)
        for segment in self._nestings(start, stop):
            shape = stretch.shape_of(segment)
            for held in sets:
                key = (signature, shape, *sorted(stretch.names[v] for v in held))
                yield _Candidate(
                    key, partial(_nested, graph, segment, held, self._memory.innermost)
                )

    def _nestings(self, start: int, stop: int) -> Iterator[Segment]:
        """Yield segments over a stretch with others inside."""
        if self._finer is None:
            return
        first, last = self.places[start], self.places[stop]
        if stop - start > 1:
            yield from nestings(self.places[start : stop + 1])
        if stop - start <= 2:
            for parts in (2, 3, 4):
                inner = self._finer.split(first, last, parts)
                if len(inner) > 2:
                    yield nestings(inner)[0]

    def _work_out(self, stretch: Part, candidates: Sequence[_Candidate]) -> None:
        """See to it that the costs of all candidates are known."""
        known = self._memory.costs
        flat: dict[object, tuple[int, ...]] = {}
        for candidate in candidates:
            if candidate.key in known:
                continue
            if candidate.held is None:
                known[candidate.key] = self._costs(stretch, candidate.make())
            else:
                flat[candidate.key] = candidate.held
        if flat:
            found = costs_of_holding(
                self.graph,
                (stretch.first, stretch.last),
                stretch.rows,
                list(flat.values()),
                self._memory.mentions(self.graph),
            )
            known.update(zip(flat, found, strict=True))

    def _ways(self, stretch: Part, candidates: Sequence[_Candidate]) -> Iterator[Way]:
        """Yield the candidates with what they cost."""
        costs = [self._memory.costs[candidate.key] for candidate in candidates]
        use = np.array([cost.use for cost in costs]) + self._natural[stretch.rows]
        peaks = use.max(axis=1, initial=0).astype(np.int64).tolist()
        for candidate, cost, peak_bytes in zip(candidates, costs, peaks, strict=True):
            seconds = self._seconds.get(candidate.key)
            if seconds is None:
                seconds = cost.seconds(self.graph, stretch.inside.start)
                self._seconds[candidate.key] = seconds
            yield Way(candidate.make, seconds, cost.held_bytes, peak_bytes)

    def _costs(self, stretch: Part, option: Option) -> Costs:
        """Return what an option takes.

        What is read after the stretch is charged here, once, whoever holds it; what is
        read from before it has been charged there. What only an open region holds is
        not counted: the plan as a whole is simulated in the end.
        """
        graph, half = self.graph, self._memory_use.half
        until = self._memory_use.until.copy()
        crossing = {graph.values[value].storage for value in stretch.crossing}
        held: set[int] = set()
        for storage, released in option.footprint.holds.items():
            if released >= half:
                held.add(storage)
            else:
                until[storage] = max(int(until[storage]), released)
        held_bytes = 0
        for storage in held | crossing:
            if graph.storages[storage].born not in stretch.inside:
                until[storage] = graph.moments
            elif until[storage] < half:
                held_bytes += graph.storages[storage].bytes
        use = self._memory_use.added(option.footprint, until).at(stretch.rows)
        start = stretch.inside.start
        replays = tuple(
            tuple(number - start for number in replay.operations)
            for replay in option.footprint.replays
        )
        return Costs(replays, option.recorded, held_bytes, use)


def _nested(
    graph: Graph, segment: Segment, held: Iterable[int], innermost: Innermost
) -> Option:
    return nested(graph, holds(graph, segment, held), innermost)


def _by_producer(
    graph: Graph, held: Iterable[int]
) -> tuple[list[int], tuple[int, ...]]:
    """Return the producers of values, in order, and the values."""
    values = sorted(held, key=lambda value: (graph.values[value].producer, value))
    return [graph.values[value].producer for value in values], tuple(values)


def _between(held: tuple[list[int], tuple[int, ...]], inside: range) -> tuple[int, ...]:
    """Return those of some values that are made in a stretch."""
    producers, values = held
    low = bisect_left(producers, inside.start)
    return values[low : bisect_left(producers, inside.stop)]


def _undominated(ways: Iterable[Way]) -> list[Way]:
    """Return the ways that no other one beats in all figures."""
    found: list[Way] = []
    for way in sorted(ways, key=lambda w: (w.seconds, w.held_bytes, w.peak_bytes)):
        if not any(
            other.held_bytes <= way.held_bytes and other.peak_bytes <= way.peak_bytes
            for other in found
        ):
            found.append(way)
    return found

"""Options to run an interval of forward; equal intervals share them."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from recoup.core.footprint import Footprint, footprint
from recoup.core.graph import BEFORE, Floats, Graph, Integers
from recoup.core.memory_use import MemoryUse, Spans
from recoup.core.segments import Action, Interval, Segment
from recoup.core.trim_segments import recorded_narrowly
from recoup.planners.min_cut import demand_between, frontier_of
from recoup.planners.places import Finer


@dataclass(frozen=True)
class Option:
    """One option to run an interval of forward.

    Attributes:
        segments: Its segments; none: everything is kept.
        footprint: Their effect on memory and time.
        recorded: The number of recorded operators, for trimmed segments.
        recording_seconds: Time that this adds to forward.
    """

    segments: tuple[Segment, ...]
    footprint: Footprint
    recorded: int = 0
    recording_seconds: float = 0.0

    @cached_property
    def seconds(self) -> float:
        """The seconds of recomputing and recording."""
        replays = sum(replay.seconds for replay in self.footprint.replays)
        return replays + self.recording_seconds


def keep_all(graph: Graph, start: int, stop: int) -> Option:
    """Return the option without a segment."""
    total = Footprint()
    for save in graph.saves_between(start, stop):
        total.hold(graph, save)
    return Option((), total)


def with_actions(
    graph: Graph, start: int, stop: int, actions: Mapping[int, Action]
) -> Option:
    """Return the option to run an interval as one segment."""
    return nested(graph, Segment(start, stop, dict(actions)))


def holding(graph: Graph, start: int, stop: int, held: Iterable[int]) -> Option:
    """Return the option that holds some values and recomputes the others."""
    return with_actions(graph, start, stop, dict.fromkeys(held, Action.KEEP))


def nested(graph: Graph, segment: Segment) -> Option:
    """Return the option to run an interval as a segment with others inside."""
    found = footprint(graph, segment)
    recorded = recorded_narrowly(graph, segment, found)
    return Option((segment,), found, recorded, recorded * graph.recording_seconds)


def kept_around(graph: Graph, intervals: Iterable[Interval]) -> Footprint:
    """Return the footprint of values that autograd saves outside some intervals."""
    total = Footprint()
    position = 0
    for start, stop in intervals:
        for save in graph.saves[position : graph.boundaries[start].saves]:
            total.hold(graph, save)
        position = graph.boundaries[stop].saves
    for save in graph.saves[position:]:
        total.hold(graph, save)
    return total


def footprints_of(options: Iterable[Option]) -> list[Footprint]:
    """Return the footprints of options."""
    return [option.footprint for option in options]


def segments_of(options: Iterable[Option]) -> tuple[Segment, ...]:
    """Return the segments of options, in order."""
    return tuple(segment for option in options for segment in option.segments)


_SETS = 16
_LONG = 1000


class PricedInterval:
    """An interval between two boundaries, and its signature."""

    def __init__(self, graph: Graph, first: int, last: int) -> None:
        self.graph = graph
        self.first = first
        self.last = last
        self.inside = inside = graph.operations_between(first, last)
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
        self.crossing = _crossing(graph, inside)
        crossing = {graph.values[value].storage for value in self.crossing}
        self.crossing_storages = frozenset(
            storage for storage in crossing if graph.storages[storage].born in inside
        )

    def signature(self) -> object:
        """Return a key that is equal for intervals whose options use the same memory.

        It is without times: those of equal operators are assumed to be equal.
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
        """Return the places of a segment and its inner ones, relative to here."""
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
            # Values from outside cost nothing here, unless they must be copied.
            spoilt_bytes = 0 if found.holdable else storage.bytes
            return name, found.producer in inside, spoilt_bytes
        dies: object = "later"
        if storage.dies < inside.stop:
            dies = storage.dies - inside.start
        elif storage.dies >= len(graph.operations):
            dies = ("backward", storage.dies - self.begins)
        return name, found.producer in inside, storage.bytes, found.holdable, dies


def _crossing(graph: Graph, inside: range) -> list[int]:
    """Return the values made in an interval that are read after it."""
    return [
        value
        for number in inside
        for value in graph.operations[number].makes
        if graph.storages[graph.values[value].storage].dies >= inside.stop
    ]


class Costs(NamedTuple):
    """The costs of one option of an interval.

    Attributes:
        first: The first operation of the interval that was priced.
        replays: The operations of each replay there.
        recorded: The number of recorded operators, for a trimmed segment.
        held_bytes: Bytes held at the end of forward.
        use: The bytes in use at the rows of the interval, beyond those in any case.
    """

    first: int
    replays: tuple[tuple[int, ...], ...]
    recorded: int
    held_bytes: int
    use: Floats

    def seconds(self, graph: Graph, first: int) -> float:
        """Return the seconds of recomputing and recording, in an equal interval."""
        operations, further = graph.operations, first - self.first
        total = 0.0
        for replay in self.replays:
            total += sum([operations[further + number].seconds for number in replay])
        return total + self.recorded * graph.recording_seconds


class Memory:
    """A cache of the costs of a step's intervals.

    Several partitions of one step, or of the same step with other times, share one:
    bytes do not depend on times.
    """

    def __init__(self) -> None:
        self.costs: dict[object, Costs] = {}
        self._signatures: dict[object, int] = {}
        self._intervals: dict[tuple[int, int], tuple[PricedInterval, int]] = {}
        self._held_sets: list[tuple[Graph, int, int, list[frozenset[int]]]] = []

    def held_sets(self, graph: Graph, first: int, last: int) -> list[frozenset[int]]:
        """Return the sets of values to hold in an interval at several prices per byte.

        These depend on times: each graph has its own.
        """
        for known, *ends, found in self._held_sets:
            if known is graph and ends == [first, last]:
                return found
        found = _held_sets(graph, first, last)
        self._held_sets.append((graph, first, last, found))
        return found

    def interval(
        self, graph: Graph, first: int, last: int
    ) -> tuple[PricedInterval, int]:
        """Return an interval, and a number that equal intervals share."""
        found = self._intervals.get((first, last))
        if found is None:
            interval = PricedInterval(graph, first, last)
            number = self._signatures.setdefault(
                interval.signature(), len(self._signatures)
            )
            found = self._intervals[first, last] = interval, number
        return found


def _held_sets(graph: Graph, first: int, last: int) -> list[frozenset[int]]:
    """Return the sets of values to hold in an interval at several prices per byte."""
    demand = demand_between(graph, first, last, graph.arrays.dies)
    limit = _SETS if len(demand.inside) < _LONG else _SETS // 2
    return [choice.held for choice in frontier_of(demand, limit=limit)]


def nestings(places: Sequence[int]) -> list[Segment]:
    """Return segments from the first place to the last with others inside.

    These are: one segment between each two places; about as many segments as places in
    each; and recursive halves, which hold least and recompute most.

    Examples:
        >>> flat, square, halves = nestings([0, 1, 2, 3, 4])
        >>> len(flat.inner), len(square.inner), len(halves.inner[0].inner)
        (4, 2, 2)
    """
    leaves = tuple(Segment(a, b) for a, b in pairwise(places))
    found = [Segment(places[0], places[-1], inner=leaves)]
    if len(leaves) > 3:
        length = math.isqrt(len(leaves))
        groups = [leaves[i : i + length] for i in range(0, len(leaves), length)]
        merged = tuple(Segment(g[0].start, g[-1].stop) for g in groups)
        found.append(Segment(places[0], places[-1], inner=merged))
        found.append(_halved(places))
    return found


def holds(graph: Graph, segment: Segment, held: Iterable[int]) -> Segment:
    """Return a segment that holds some values, at every level."""
    inside = graph.operations_between(segment.start, segment.stop)
    mine = [value for value in held if graph.values[value].producer in inside]
    return Segment(
        segment.start,
        segment.stop,
        dict.fromkeys(mine, Action.KEEP),
        tuple(holds(graph, inner, mine) for inner in segment.inner),
    )


def _halved(places: Sequence[int]) -> Segment:
    if len(places) == 2:
        return Segment(places[0], places[1])
    middle = len(places) // 2
    halves = (places[: middle + 1], places[middle:])
    return Segment(places[0], places[-1], inner=tuple(map(_halved, halves)))


Make = Callable[[], Option]


class IntervalOption(NamedTuple):
    """One option to run an interval.

    Attributes:
        make: Returns the option.
        seconds: The time of recomputing and recording.
        held_bytes: Bytes held at the end of forward.
        peak_bytes: The peak while it runs and while its backward does, besides bytes
            that earlier intervals hold.
    """

    make: Make
    seconds: float
    held_bytes: int
    peak_bytes: int


class _Candidate(NamedTuple):
    """A candidate option of an interval.

    Attributes:
        key: Equal for candidates of equal cost.
        make: Returns the option.
    """

    key: object
    make: Make


class IntervalOptions:
    """Makes the options to run intervals between places."""

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
        self._memory_use = MemoryUse(graph)
        self._natural = self._memory_use.bytes_at([])
        self._born = np.array([s.born for s in graph.storages], dtype=np.int64)
        self._finer = Finer(graph) if nest else None
        self._held_sets = [_by_producer(graph, held) for held in held_sets]
        self._memory = Memory() if memory is None else memory
        self._seconds: dict[object, float] = {}

    @property
    def natural_bytes(self) -> int:
        """The peak if nothing at all were saved."""
        return int(self._natural.max(initial=0))

    def between(self, start: int, stop: int) -> list[IntervalOption]:
        """Return the Pareto-optimal options to run the interval between two places."""
        first, last = self.places[start], self.places[stop]
        if not self.graph.is_within_run(first, last) and stop > start + 1:
            return []
        interval, signature = self._memory.interval(self.graph, first, last)
        if not self.graph.is_within_run(first, last):
            # Values outside calls of the model are kept.
            keep = partial(keep_all, self.graph, first, last)
            candidates = [_Candidate((signature, "kept"), keep)]
        else:
            candidates = list(self._candidates(interval, signature, start, stop))
        return _undominated(self._options(interval, candidates))

    def _candidates(
        self, interval: PricedInterval, signature: int, start: int, stop: int
    ) -> Iterator[_Candidate]:
        """Yield the candidates."""
        graph, first, last = self.graph, interval.first, interval.last
        if stop == start + 1:
            yield _Candidate((signature, "kept"), partial(keep_all, graph, first, last))
        free = [v for v in interval.crossing if graph.values[v].holdable]
        sets = dict.fromkeys(
            [(), *(_between(held, interval.inside) for held in self._held_sets)]
        )
        for held in sets:
            every = tuple(dict.fromkeys([*held, *free]))
            key = (signature, "held", *sorted([interval.names[v] for v in every]))
            yield _Candidate(key, partial(holding, graph, first, last, every))
        for segment in self._nestings(start, stop):
            shape = interval.shape_of(segment)
            for held in sets:
                key = (signature, shape, *sorted([interval.names[v] for v in held]))
                yield _Candidate(key, partial(_nested, graph, segment, held))

    def _nestings(self, start: int, stop: int) -> Iterator[Segment]:
        """Yield segments over an interval with others inside."""
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

    def _options(
        self, interval: PricedInterval, candidates: Sequence[_Candidate]
    ) -> Iterator[IntervalOption]:
        """Yield the candidates with their costs."""
        known = self._memory.costs
        new = {each.key: each for each in candidates if each.key not in known}
        if new:
            options = [candidate.make() for candidate in new.values()]
            known.update(zip(new, self._costs(interval, options), strict=True))
        costs = [known[candidate.key] for candidate in candidates]
        use = np.array([cost.use for cost in costs]) + self._natural[interval.rows]
        peaks = use.max(axis=1, initial=0).astype(np.int64).tolist()
        for candidate, cost, peak_bytes in zip(candidates, costs, peaks, strict=True):
            seconds = self._seconds.get(candidate.key)
            if seconds is None:
                seconds = cost.seconds(self.graph, interval.inside.start)
                self._seconds[candidate.key] = seconds
            yield IntervalOption(candidate.make, seconds, cost.held_bytes, peak_bytes)

    def _costs(
        self, interval: PricedInterval, options: Sequence[Option]
    ) -> Iterator[Costs]:
        """Yield the costs of options.

        Values read after the interval are charged here, once, for any holder;
        values read from before it are charged there. Values that only an open region
        holds are not counted: the whole plan is simulated in the end.
        """
        sizes, _, dies = self.graph.arrays
        half, inside = self._memory_use.half, interval.inside
        holds = [option.footprint.holds for option in options]
        owners = np.repeat(np.arange(len(holds)), [len(each) for each in holds])
        storages = np.array([s for each in holds for s in each], dtype=np.int64)
        lasts = np.array([m for each in holds for m in each.values()], dtype=np.int64)
        born = self._born[storages]
        mine = (lasts >= half) & (born >= inside.start) & (born < inside.stop)
        owners, storages, lasts = owners[mine], storages[mine], lasts[mine]
        firsts = np.maximum(dies[storages] + 1, born[mine])
        spans = [
            (owner, *span)
            for owner, option in enumerate(options)
            for found in (option.footprint,)
            for span in (*found.remade, *((n, m, m) for m, n in found.spikes.items()))
        ]
        added, *others = np.array(spans, dtype=np.int64).reshape(-1, 4).T
        columns = zip((sizes[storages], firsts, lasts), others, strict=True)
        nbytes, first, last = map(np.concatenate, columns)
        use = Spans(nbytes, first, last, first).at_each(
            interval.rows, np.concatenate([owners, added]), len(options)
        )
        # Values read after the interval, or held, and not in use in any case.
        crossing = np.zeros(len(sizes), dtype=np.bool_)
        crossing[list(interval.crossing_storages)] = True
        kept_bytes = int(sizes[crossing & (dies < half)].sum())
        alone = (dies[storages] < half) & ~crossing[storages]
        held_bytes = np.bincount(owners[alone], sizes[storages[alone]], len(options))
        for number, option in enumerate(options):
            replays = tuple([replay.operations for replay in option.footprint.replays])
            nbytes = kept_bytes + int(held_bytes[number])
            yield Costs(inside.start, replays, option.recorded, nbytes, use[number])


def _nested(graph: Graph, segment: Segment, held: Iterable[int]) -> Option:
    return nested(graph, holds(graph, segment, held))


def _by_producer(
    graph: Graph, held: Iterable[int]
) -> tuple[list[int], tuple[int, ...]]:
    """Return the producers of values, in order, and the values."""
    values = sorted(held, key=lambda value: (graph.values[value].producer, value))
    return [graph.values[value].producer for value in values], tuple(values)


def _between(held: tuple[list[int], tuple[int, ...]], inside: range) -> tuple[int, ...]:
    """Return the values that are made in an interval."""
    producers, values = held
    low = bisect_left(producers, inside.start)
    return values[low : bisect_left(producers, inside.stop)]


def _undominated(options: Iterable[IntervalOption]) -> list[IntervalOption]:
    """Return the Pareto-optimal options."""
    found: list[IntervalOption] = []
    for option in sorted(
        options, key=lambda w: (w.seconds, w.held_bytes, w.peak_bytes)
    ):
        if not any(
            other.held_bytes <= option.held_bytes
            and other.peak_bytes <= option.peak_bytes
            for other in found
        ):
            found.append(option)
    return found

"""An interval as one segment: what holding each of several sets of values costs.

`recoup.core.footprint` says what a segment costs. Here that is worked out for many sets
of held values at once: recomputed operators as bits, one for each set, and bytes in
arrays with a row for each set.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recoup.core.graph import Claim, Floats, Graph, Integers
from recoup.core.segments import Interval, recorded_operators
from recoup.core.trim_segments import operators_around

_MOST = 60
"""Sets that are worked out at once: the bits of a machine's integer."""

_NEVER = np.iinfo(np.int64).max

_Span = tuple[int, int, int, int]
"""In which sets bytes are in use, how many, from which moment to which."""


@dataclass(frozen=True)
class Costs:
    """The costs of one option of an interval.

    Attributes:
        replays: The operations of each replay, counted from the first of the interval.
        recorded: How many operators are recorded, by a narrow segment.
        held_bytes: Bytes held at the end of forward.
        use: The bytes in use at the rows of the interval, beyond what is there anyway.
    """

    replays: tuple[tuple[int, ...], ...]
    recorded: int
    held_bytes: int
    use: Floats

    def seconds(self, graph: Graph, first: int) -> float:
        """Return the seconds of recomputing and of recording for it."""
        operations = graph.operations
        total = 0.0
        for replay in self.replays:
            total += sum([operations[first + number].seconds for number in replay])
        return total + self.recorded * graph.recording_seconds


class Mentions:
    """The storages that operators mention, in the order of the operators."""

    def __init__(self, graph: Graph) -> None:
        values = graph.values
        made: list[tuple[int, int]] = []
        mentioned: list[tuple[int, int]] = []
        for number, operation in enumerate(graph.operations):
            makes = [(number, values[v].storage) for v in operation.makes]
            made += makes
            mentioned += makes
            mentioned += [(number, values[v].storage) for v in operation.reads]
        self._made = np.array(made, dtype=np.int64).reshape(-1, 2)
        self._mentioned = np.array(mentioned, dtype=np.int64).reshape(-1, 2)
        self.bytes = np.array([s.bytes for s in graph.storages], dtype=np.int64)
        self.workspace_bytes = np.array(
            [o.workspace_bytes for o in graph.operations], dtype=np.int64
        )

    def made(self, inside: range) -> tuple[Integers, Integers]:
        """Return operations and what they make, by storages."""
        return _sorted(_between(self._made, inside))

    def mentioned(self, inside: range) -> tuple[Integers, Integers]:
        """Return operations and what they read or make, by storages."""
        return _sorted(_between(self._mentioned, inside))


def costs_of_holding(
    graph: Graph,
    interval: Interval,
    rows: Integers,
    sets: Sequence[Iterable[int]],
    mentions: Mentions | None = None,
) -> list[Costs]:
    """Return what an interval costs as one segment, for each set of values to hold.

    Costs one pass over the operators for all sets, and arrays of sets by moments.

    Examples:
        >>> from recoup.core.graph import Boundary
        >>> places = (Boundary(0, 0), Boundary(0, 0))
        >>> empty = Graph((), 0, (), (), (), places, ())
        >>> costs_of_holding(empty, (0, 1), np.arange(0), [()])[0].held_bytes
        0
    """
    mentions = mentions or Mentions(graph)
    found: list[Costs] = []
    for start in range(0, len(sets), _MOST):
        some = sets[start : start + _MOST]
        found += _Flat(graph, interval, rows, some, mentions).costs()
    return found


class _Flat:
    """One interval, and sets of values that may be held in it; set n is bit n."""

    def __init__(
        self,
        graph: Graph,
        interval: Interval,
        rows: Integers,
        sets: Sequence[Iterable[int]],
        mentions: Mentions,
    ) -> None:
        self.graph = graph
        self.rows = rows
        self.mentions = mentions
        self.count = len(sets)
        self.inside = graph.operations_between(*interval)
        first, last = graph.boundaries[interval[0]], graph.boundaries[interval[1]]
        claims = graph.claims[first.saves : last.saves]
        self.end = max((claim.dies for claim in claims), default=0)
        self.interval = interval
        self.saves = [
            number
            for number, claim in enumerate(claims, first.saves)
            if graph.values[claim.value].producer in self.inside
        ]
        self.claims = [graph.claims[number] for number in self.saves]
        self.held: dict[int, int] = {}
        for number, values in enumerate(sets):
            for value in values:
                self.held[value] = self.held.get(value, 0) | 1 << number

    def costs(self) -> list[Costs]:
        """Return what each set costs."""
        needed, demanded = self._replayed()
        runs = self._of_sets(needed)
        # One change for each row, and one after the last.
        changes = np.zeros((self.count, len(self.rows) + 1))
        held_bytes = self._hold(demanded, changes)
        claims = self.graph.claims
        saves = [n for n in self.saves if self._replayable(claims[n])]
        wanted = [claims[n] for n in saves]
        masks = [~self.held.get(claim.value, 0) for claim in wanted]
        asked = self._of_sets(masks)
        if wanted:
            self._leave(runs, wanted, asked, changes)
        use = np.cumsum(changes[:, :-1], axis=1)
        recorded = self._recorded(runs, saves, asked)
        return [
            Costs(
                (tuple(np.flatnonzero(runs[number]).tolist()),)
                if number in recorded
                else (),
                recorded.get(number, 0),
                held_bytes[number],
                use[number],
            )
            for number in range(self.count)
        ]

    def _recorded(
        self, runs: NDArray[np.bool_], saves: Sequence[int], asked: NDArray[np.bool_]
    ) -> dict[int, int]:
        """Return how much is recorded, for the sets in which something is asked for."""
        replays = np.flatnonzero(asked.any(axis=1))
        if not len(replays):
            return {}
        runs, asked = runs[replays], asked[replays]
        numbers = np.array(saves)
        counts = operators_around(
            self.graph,
            self.interval,
            self.inside.start + _ends(runs),
            numbers[_ends(asked)],
        )
        recorded = map(recorded_operators, counts.tolist())
        return dict(zip(replays.tolist(), recorded, strict=True))

    def _replayable(self, claim: Claim) -> bool:
        producer = self.graph.values[claim.value].producer
        return self.graph.operations[producer].replayable

    def _of_sets(self, masks: Sequence[int]) -> NDArray[np.bool_]:
        """Return bits as an array with a row for each set."""
        bits = np.array(masks, dtype=np.int64).reshape(1, -1)
        return (bits >> np.arange(self.count)[:, None]) & 1 == 1

    def _replayed(self) -> tuple[list[int], dict[int, int]]:
        """Return in which sets operations are recomputed and values are demanded."""
        operations, held = self.graph.operations, self.held
        demanded: dict[int, int] = {}
        everywhere = (1 << self.count) - 1
        for claim in self.claims:
            demanded[claim.value] = everywhere
        needed: list[int] = []
        for number in reversed(self.inside):
            operation = operations[number]
            runs = 0
            if operation.replayable:
                for value in operation.makes:
                    asked = demanded.get(value)
                    if asked:
                        runs |= asked & ~held.get(value, 0)
            if runs:
                for value in operation.reads:
                    demanded[value] = demanded.get(value, 0) | runs
            needed.append(runs)
        needed.reverse()
        return needed, demanded

    def _hold(self, demanded: dict[int, int], changes: Floats) -> list[int]:
        """Add the bytes held from the interval on; return those after forward."""
        graph, inside = self.graph, self.inside
        holds: dict[int, int] = {}
        spans: list[_Span] = []
        for value, asked in demanded.items():
            found = graph.values[value]
            if found.producer not in inside:
                if not found.holdable:
                    # It is written over: only a copy can be held.
                    nbytes = graph.bytes_of(value)
                    spans.append((asked, nbytes, inside.start, self.end))
                continue
            if graph.operations[found.producer].replayable:
                asked &= self.held.get(value, 0)
            if asked:
                holds[found.storage] = holds.get(found.storage, 0) | asked
        half = len(graph.operations)
        charged = dict.fromkeys(self._crossing(), (1 << self.count) - 1)
        for storage, sets in holds.items():
            found = graph.storages[storage]
            if found.born in inside:
                first = max(found.dies + 1, found.born)
                spans.append((sets, found.bytes, first, self.end))
                charged.setdefault(storage, sets)
        self._add(changes, spans)
        charged = {s: b for s, b in charged.items() if graph.storages[s].dies < half}
        nbytes = self.mentions.bytes[list(charged)]
        return (self._of_sets(list(charged.values())) @ nbytes).tolist()

    def _crossing(self) -> Iterator[int]:
        """Yield the storages of the interval that are read after it."""
        graph, inside = self.graph, self.inside
        for number in inside:
            for value in graph.operations[number].makes:
                storage = graph.values[value].storage
                found = graph.storages[storage]
                if found.dies >= inside.stop and found.born in inside:
                    yield storage

    def _add(self, changes: Floats, spans: Sequence[_Span]) -> None:
        """Add bytes from first moments to last ones, for some sets each."""
        if not spans:
            return
        masks, sizes, firsts, lasts = zip(*spans, strict=True)
        lows = np.searchsorted(self.rows, firsts)
        highs = np.searchsorted(self.rows, lasts, side="right")
        nbytes = np.where(highs > lows, sizes, 0) * self._of_sets(masks)
        offsets = changes.shape[1] * np.arange(self.count)[:, None]
        places = [(lows + offsets).ravel(), (highs + offsets).ravel()]
        first, last = (np.bincount(p, nbytes.ravel(), changes.size) for p in places)
        changes += (first - last).reshape(changes.shape)

    def _leave(
        self,
        runs: NDArray[np.bool_],
        wanted: Sequence[Claim],
        asked: NDArray[np.bool_],
        changes: Floats,
    ) -> None:
        """Add what replays leave in use, and what they take while they run."""
        graph = self.graph
        storages = np.array([graph.values[c.value].storage for c in wanted])
        order = np.argsort(storages, kind="stable")
        storages, starts = np.unique(storages[order], return_index=True)
        used = np.array([claim.used for claim in wanted])
        gone = np.array([claim.gone[0] for claim in wanted])
        first: Integers = np.where(asked, used, _NEVER).min(axis=1)
        until = np.where(asked, gone, -1)[:, order]
        until = np.maximum.reduceat(until, starts, axis=1)
        replays = np.flatnonzero(asked.any(axis=1))
        nbytes = self.mentions.bytes[storages]
        left = np.where(until >= first[:, None], nbytes, 0)
        left_bytes = left.sum(axis=1)
        lows = np.searchsorted(self.rows, first[replays])
        changes[replays, lows] += left_bytes[replays]
        width = changes.shape[1]
        highs = np.searchsorted(self.rows, until, side="right")
        highs += width * np.arange(self.count)[:, None]
        ends = np.bincount(highs.ravel(), left.ravel(), changes.size)
        changes -= ends.reshape(changes.shape)
        peak_bytes = self._peaks(runs, storages, until >= 0)[replays]
        awaited = np.zeros(len(replays), dtype=np.int64)
        if graph.own_bytes:
            moments: list[int] = first[replays].tolist()
            awaited = np.array([graph.own_bytes[moment] for moment in moments])
        spikes = np.maximum(0, peak_bytes - left_bytes[replays] - awaited)
        changes[replays, lows] += spikes
        changes[replays, lows + 1] -= spikes

    def _peaks(
        self, runs: NDArray[np.bool_], kept: Integers, keeps: NDArray[np.bool_]
    ) -> Integers:
        """Return the most bytes that replays take, for each set."""
        start, count = self.inside.start, len(self.inside)
        makers, made = self.mentions.made(self.inside)
        storages, places = np.unique(made, return_index=True)
        makers = makers - start
        born = np.where(runs[:, makers], makers, count)
        born = np.minimum.reduceat(born, places, axis=1)
        users, mentioned = self.mentions.mentioned(self.inside)
        inside = np.isin(mentioned, storages)
        users, mentioned = users[inside] - start, mentioned[inside]
        _, places = np.unique(mentioned, return_index=True)
        last = np.where(runs[:, users], users, -1)
        last = np.maximum.reduceat(last, places, axis=1)
        column = np.searchsorted(storages, kept)
        last[:, column] = np.where(keeps, count - 1, last[:, column])
        nbytes = np.where(born < count, self.mentions.bytes[storages], 0)
        width = count + 1
        offsets = width * np.arange(self.count)[:, None]
        size = width * self.count
        live = np.bincount((born + offsets).ravel(), nbytes.ravel(), size)
        live -= np.bincount((last + 1 + offsets).ravel(), nbytes.ravel(), size)
        live = np.cumsum(live.reshape(self.count, width)[:, :-1], axis=1)
        live += self.mentions.workspace_bytes[start : start + count]
        return np.where(runs, live, 0).max(axis=1, initial=0).astype(np.int64)


def _ends(flags: NDArray[np.bool_]) -> Integers:
    """Return the first and the last place that is set in each row."""
    return np.array(
        [flags.argmax(axis=1), flags.shape[1] - 1 - flags[:, ::-1].argmax(axis=1)]
    )


def _between(pairs: Integers, inside: range) -> Integers:
    """Return the pairs of some operations."""
    low, high = np.searchsorted(pairs[:, 0], (inside.start, inside.stop))
    return pairs[low:high]


def _sorted(pairs: Integers) -> tuple[Integers, Integers]:
    """Return the two sides of pairs, by the second."""
    order = np.argsort(pairs[:, 1], kind="stable")
    return pairs[order, 0], pairs[order, 1]

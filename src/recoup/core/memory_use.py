"""Memory over time: footprints as spans of bytes, and the bytes in use at each moment.

Footprints become bytes only here. The simulator adds up all spans of a plan, planners
those of many plans, and reports sort them into bands.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recoup.core.footprint import Footprint, Offload
from recoup.core.graph import Floats, Graph, Integers
from recoup.core.replays import spikes

REMADE = -1
"""The source of bytes that a replay leaves in use, or that are copied."""

SPIKE = -2
"""The source of bytes that replays need only while they run."""


_NONE = Footprint()


class Spans(NamedTuple):
    """Bytes, each with the first and the last moment at which they are in use.

    A span whose last moment comes before its first holds nothing.

    Attributes:
        nbytes: The number of bytes.
        first: The first moment.
        last: The last moment; it may be after the end of the step.
        source: The number of a storage, `REMADE` or `SPIKE`.
    """

    nbytes: Integers
    first: Integers
    last: Integers
    source: Integers

    def only(self, chosen: NDArray[np.bool_]) -> "Spans":
        """Return some of the spans."""
        return Spans(*(column[chosen] for column in self))

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield the spans one by one."""
        columns: list[list[int]] = [column.tolist() for column in self]
        nbytes, first, last, source = columns
        return zip(nbytes, first, last, source, strict=True)

    def at_all(self, moments: int) -> Integers:
        """Return the bytes in use at every moment of a step.

        Examples:
            >>> one = Spans(*np.array([[5], [1], [2], [0]]))
            >>> one.at_all(4).tolist()
            [0, 5, 5, 0]
        """
        ends = np.minimum(self.last, moments - 1) + 1
        nbytes = np.where(ends > self.first, self.nbytes, 0)
        # Sums of whole numbers below 2**53 are exact in floating point.
        first = np.minimum(self.first, moments)
        changes = np.bincount(first, nbytes, moments + 1)
        changes -= np.bincount(np.maximum(ends, 0), nbytes, moments + 1)
        return np.cumsum(changes[:moments]).astype(np.int64)

    def at(self, rows: Integers) -> Floats:
        """Return the bytes in use at some moments."""
        inside = (rows >= self.first[:, None]) & (rows <= self.last[:, None])
        return self.nbytes.astype(np.float64) @ inside

    def at_each(self, rows: Integers, owners: Integers, count: int) -> Floats:
        """Return the bytes in use at increasing moments, one row for each owner.

        Args:
            rows: The moments.
            owners: The owner of each span, below `count`.
            count: The number of owners.

        Examples:
            >>> two = Spans(*np.array([[5, 7], [1, 2], [2, 9], [0, 0]]))
            >>> two.at_each(np.array([0, 2, 4]), np.array([0, 1]), 2).tolist()
            [[0.0, 5.0, 0.0], [0.0, 7.0, 7.0]]
        """
        first = np.searchsorted(rows, self.first)
        stop = np.maximum(np.searchsorted(rows, self.last, side="right"), first)
        width = len(rows) + 1
        starts = owners * width
        nbytes = self.nbytes.astype(np.float64)
        changes = np.bincount(starts + first, nbytes, count * width)
        changes -= np.bincount(starts + stop, nbytes, count * width)
        return changes.reshape(count, width)[:, :-1].cumsum(axis=1)


class MemoryUse:
    """The memory of a step, for any footprints of disjoint intervals of it.

    Attributes:
        graph: The step.
        half: The first moment of backward.
        until: The last moment at which each storage is in use without a footprint.

    Args:
        graph: The step.
        outside: Values held in any case, such as those saved outside all intervals.
    """

    def __init__(self, graph: Graph, outside: Iterable[Footprint] = ()) -> None:
        self.graph = graph
        self.half = len(graph.operations)
        self.until = held_until(graph.arrays.dies, outside)
        self._other = np.array(graph.other_bytes, dtype=np.int64)

    def spans(self, footprints: Sequence[Footprint]) -> Spans:
        """Return all bytes of the step except `Graph.other_bytes`."""
        graph, half = self.graph, self.half
        sizes, born, _ = graph.arrays
        until = held_until(self.until, footprints)
        more: list[tuple[int, int, int, int]] = []
        for offload in self._copied(footprints, until):
            storage = offload.storage
            until[storage] = max(int(until[storage]), min(offload.leaves, half) - 1)
            first = max(offload.used - 1, half)
            more.append((int(sizes[storage]), first, offload.released, storage))
        more += [(n, at, at, SPIKE) for at, n in _spikes(footprints).items()]
        others = np.array(more, dtype=np.int64).reshape(-1, 4).T
        remade = np.concatenate([each.remade_spans for each in footprints or [_NONE]])
        sources = np.full(len(remade), REMADE)
        storages = (sizes, born, until, np.arange(len(sizes)))
        columns = zip(storages, (*remade.T, sources), others, strict=True)
        return Spans(*map(np.concatenate, columns))

    def bytes_at(self, footprints: Sequence[Footprint]) -> Integers:
        """Return the bytes in use at each moment."""
        return self.bytes_of(self.spans(footprints))

    def bytes_of(self, spans: Spans) -> Integers:
        """Return the bytes in use at each moment, from those of `spans`."""
        return spans.at_all(self.graph.moments) + self._other

    def peak_bytes(self, footprints: Sequence[Footprint]) -> int:
        """Return the most bytes in use at any moment."""
        return int(self.bytes_at(footprints).max(initial=0))

    def host_bytes(self, footprints: Sequence[Footprint]) -> int:
        """Return the bytes that are copied to the host."""
        until = held_until(self.until, footprints)
        sizes = self.graph.arrays.bytes
        return sum(int(sizes[o.storage]) for o in self._copied(footprints, until))

    def added(self, footprint: Footprint, until: Integers) -> Spans:
        """Return the bytes of a footprint beyond those in use without it.

        `until` is the last moment at which storages are in use without it.
        """
        sizes, born, _ = self.graph.arrays
        storages, lasts = footprint.held
        firsts = np.maximum(until[storages] + 1, born[storages])
        more = [(*span, REMADE) for span in footprint.remade]
        for offload in self._copied([footprint], until):
            storage = offload.storage
            nbytes = int(sizes[storage])
            leaves = min(offload.leaves, self.half) - 1
            back = max(offload.used - 1, self.half)
            more.append((nbytes, int(until[storage]) + 1, leaves, storage))
            more.append((nbytes, back, offload.released, storage))
        more += [(n, at, at, SPIKE) for at, n in footprint.spikes.items()]
        others = np.array(more, dtype=np.int64).reshape(-1, 4).T
        held = (sizes[storages], firsts, lasts, storages)
        return Spans(*map(np.concatenate, zip(held, others, strict=True)))

    def _copied(
        self, footprints: Iterable[Footprint], until: Integers
    ) -> list[Offload]:
        """Return the offloads of storages that are not held on the device anyway."""
        found: dict[int, Offload] = {}
        for offload in (o for each in footprints for o in each.offloads):
            other = found.get(offload.storage, offload)
            found[offload.storage] = Offload(
                offload.storage,
                max(offload.leaves, other.leaves),
                min(offload.used, other.used),
                max(offload.released, other.released),
            )
        return [o for o in found.values() if until[o.storage] < self.half]


def held_until(until: Integers, footprints: Iterable[Footprint]) -> Integers:
    """Return the last moments of storages, extended by footprints."""
    result = until.copy()
    held = [each.held for each in footprints]
    if held:
        storages, lasts = map(np.concatenate, zip(*held, strict=True))
        np.maximum.at(result, storages, lasts)
    return result


def _spikes(footprints: Sequence[Footprint]) -> dict[int, int]:
    """Return the bytes of replays at a moment beyond all others in use there."""
    if len(footprints) == 1:
        return footprints[0].spikes
    found: dict[int, int] = {}
    for each in footprints:
        found.update(each.spikes)
    if len(found) == sum([len(each.spikes) for each in footprints]):
        return found
    # Replays of several intervals at one moment run with values that others leave.
    return spikes(
        [replay for each in footprints for replay in each.replays],
        [one for each in footprints for one in each.passing],
    )

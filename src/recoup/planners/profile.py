"""Bytes in use at every moment, for many plans of one graph: `simulate`, in arrays."""

from collections.abc import Iterable, Sequence

import numpy as np

from recoup.core.footprint import Offload
from recoup.core.graph import Graph
from recoup.core.simulation import stall_seconds
from recoup.planners.options import Floats, Integers, Option

Spans = tuple[Integers, Integers, Integers]
"""Bytes, with the first and the last moment at which they are in use."""


class Profile:
    """Adds up options of disjoint stretches as the simulator does.

    Args:
        graph: The step.
        outside: What is held whatever the options are, such as what autograd saves
            in no stretch.
    """

    def __init__(self, graph: Graph, outside: Iterable[Option] = ()) -> None:
        self.graph = graph
        self.half = len(graph.operations)
        storages = graph.storages
        count = len(storages)
        self._bytes = np.fromiter((s.bytes for s in storages), np.int64, count)
        self._born = np.fromiter((max(s.born, 0) for s in storages), np.int64, count)
        self.until = np.fromiter((s.dies for s in storages), np.int64, count)
        self._other = np.array(graph.other_bytes, dtype=np.int64)
        for option in outside:
            _raise(self.until, option)

    def bytes_at(self, options: Sequence[Option]) -> Integers:
        """Return the bytes in use at each moment."""
        until = self.until.copy()
        for option in options:
            _raise(until, option)
        events: list[tuple[int, int, int]] = []
        spikes: dict[int, int] = {}
        for option in options:
            for offload in option.footprint.offloads:
                events += self._offloaded(until, offload)
            events += option.footprint.remade
            for moment, nbytes in option.spikes.items():
                spikes[moment] = max(spikes.get(moment, 0), nbytes)
        moments = self.graph.moments
        last = np.minimum(until, moments - 1) + 1
        changes = np.bincount(self._born, self._bytes, moments + 1)
        changes -= np.bincount(last, self._bytes, moments + 1)
        if events:
            amounts, first, final = np.array(events, dtype=np.int64).T
            final = np.minimum(final, moments - 1) + 1
            changes += np.bincount(first, amounts, moments + 1)
            changes -= np.bincount(final, amounts, moments + 1)
        total = np.cumsum(changes[:moments]).astype(np.int64) + self._other
        for moment, nbytes in spikes.items():
            total[moment] += nbytes
        return total

    def _offloaded(
        self, until: Integers, offload: Offload
    ) -> list[tuple[int, int, int]]:
        storage = offload.storage
        if until[storage] >= self.half:
            return []
        leaves = min(offload.leaves, self.half) - 1
        until[storage] = max(int(until[storage]), leaves)
        first = max(offload.used - 1, self.half)
        return [(int(self._bytes[storage]), first, offload.released)]

    def host_bytes(self, options: Sequence[Option]) -> int:
        """Return what is copied to the host."""
        until = self.until.copy()
        for option in options:
            _raise(until, option)
        storages = {o.storage for option in options for o in option.footprint.offloads}
        return sum(int(self._bytes[s]) for s in storages if until[s] < self.half)

    def seconds(self, options: Sequence[Option]) -> float:
        """Return what is run again and waited for."""
        replays = sum(option.seconds for option in options)
        return replays + stall_seconds(self.graph, self.host_bytes(options))

    def spans(self, option: Option, until: Integers) -> Spans:
        """Return what an option takes, and when, beyond what is there anyway.

        Args:
            option: One option of a stretch.
            until: When storages are let go of without it.
        """
        storages, lasts = option.holds
        firsts = np.maximum(until[storages] + 1, self._born[storages])
        more = list(option.footprint.remade)
        for offload in option.footprint.offloads:
            storage = offload.storage
            if until[storage] < self.half:
                nbytes = int(self._bytes[storage])
                leaves = min(offload.leaves, self.half) - 1
                back = max(offload.used - 1, self.half)
                more.append((nbytes, int(until[storage]) + 1, leaves))
                more.append((nbytes, back, offload.released))
        more += [(nbytes, moment, moment) for moment, nbytes in option.spikes.items()]
        others = np.array(more, dtype=np.int64).reshape(-1, 3).T
        return (
            np.concatenate([self._bytes[storages], others[0]]),
            np.concatenate([firsts, others[1]]),
            np.concatenate([lasts, others[2]]),
        )

    def use(self, option: Option, until: Integers, rows: Integers) -> Floats:
        """Return what an option takes at some moments beyond what is there anyway."""
        return at_rows(self.spans(option, until), rows)


def at_rows(spans: Spans, rows: Integers) -> Floats:
    """Return the bytes of spans at some moments."""
    amounts, firsts, lasts = spans
    inside = (rows >= firsts[:, None]) & (rows <= lasts[:, None])
    return amounts.astype(np.float64) @ inside


def at_all(spans: Spans, moments: int) -> Floats:
    """Return the bytes of spans at every moment."""
    amounts, firsts, lasts = spans
    real = lasts >= firsts
    changes = np.bincount(firsts[real], amounts[real], moments + 1)
    ends = np.minimum(lasts[real], moments - 1) + 1
    changes -= np.bincount(ends, amounts[real], moments + 1)
    return np.cumsum(changes[:moments], dtype=np.float64)


def _raise(until: Integers, option: Option) -> None:
    storages, lasts = option.holds
    until[storages] = np.maximum(until[storages], lasts)

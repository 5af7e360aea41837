"""Replays: the memory and time of running operators again in backward."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from recoup.core.graph import Graph
from recoup.core.segments import Segment


class Replay(NamedTuple):
    """One replay of a segment.

    Attributes:
        segment: The replayed segment.
        moment: The moment of backward before which it runs.
        operations: The operations in order.
        peak_bytes: The peak of its own values and workspaces, and of the roots that
            it frees.
        seconds: How long it takes.
        left_bytes: Bytes still in use after it.
        awaited_bytes: Bytes of the operator of that moment, after the replay.
        depth: The number of segments around it.
        fetched_bytes: Bytes of roots with no later use: each is freed at its last
            use.
    """

    segment: Segment
    moment: int
    operations: tuple[int, ...]
    peak_bytes: int
    seconds: float
    left_bytes: int = 0
    awaited_bytes: int = 0
    depth: int = 0
    fetched_bytes: int = 0


class Passing(NamedTuple):
    """A storage that a replay made and that an inner replay frees.

    Attributes:
        storage: Its number.
        bytes: Its size.
        made: The moment and depth of the replay that made it.
        gone: The moment and depth of the replay that frees it.
    """

    storage: int
    bytes: int
    made: tuple[int, int]
    gone: tuple[int, int]


def run_again(
    graph: Graph,
    operations: Sequence[int],
    wanted: set[int],
    fetched: Iterable[int] = (),
    *,
    by_call: bool = False,
) -> tuple[int, float]:
    """Return the peak bytes and the seconds of running operations again.

    Args:
        graph: The step.
        operations: The operations in order.
        wanted: The storages that outlive the replay.
        fetched: Storages in use at its start that nothing else needs.
        by_call: A call runs again: its variables keep values alive as in forward, not
            only until their last use.
    """
    mentioned, sizes = graph.mentioned, graph.sizes
    last = {s: number for number in operations for s in mentioned[number]}
    if by_call:
        stop, storages = operations[-1], graph.storages
        last = {s: max(n, min(storages[s].dies, stop)) for s, n in last.items()}
    last.update(dict.fromkeys(wanted, len(graph.operations)))
    live = set(fetched)
    live_bytes = peak_bytes = sum(sizes[storage] for storage in live)
    seconds = 0.0
    for number in operations:
        operation = graph.operations[number]
        for value in operation.makes:
            storage = graph.values[value].storage
            if storage not in live:
                live.add(storage)
                live_bytes += sizes[storage]
        used_bytes = live_bytes + operation.workspace_bytes
        if used_bytes > peak_bytes:
            peak_bytes = used_bytes
        seconds += operation.seconds
        for storage in tuple(live) if by_call else mentioned[number]:
            if last[storage] == number and storage in live:
                live.discard(storage)
                live_bytes -= sizes[storage]
    return peak_bytes, seconds


def spikes(replays: Iterable[Replay], passing: Iterable[Passing]) -> dict[int, int]:
    """Return the bytes of replays at a moment beyond all others in use there.

    A segment is replayed after the one around it, from whose values it starts: results
    of the inner replay do not exist yet while the outer one runs. No order is assumed
    among segments that are not nested. All replays run before the moment's operator,
    without its memory.
    """
    at: dict[int, list[Replay]] = {}
    for replay in replays:
        at.setdefault(replay.moment, []).append(replay)
    passing_at: dict[int, list[Passing]] = {}
    for one in passing:
        passing_at.setdefault(one.gone[0], []).append(one)
    found: dict[int, int] = {}
    for moment, together in at.items():
        after = 0
        peak = 0
        for depth in sorted({replay.depth for replay in together}):
            level = [replay for replay in together if replay.depth == depth]
            after += sum(replay.left_bytes for replay in level)
            there = sum(
                one.bytes
                for one in passing_at.get(moment, ())
                if one.made < (moment, depth) <= one.gone
            )
            spike = max(r.peak_bytes - r.left_bytes - r.fetched_bytes for r in level)
            peak = max(peak, after + there + spike)
        awaited = min(replay.awaited_bytes for replay in together)
        found[moment] = max(0, peak - after - awaited)
    return found

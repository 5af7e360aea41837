"""Footprints: the values that segments hold, drop and replay, by the engine's rules.

An open region holds every value from outside that its operators read, since a replay
may start from any of them. When it closes, it drops the values that no replay reads and
holds the rest until the last tensor saved in it is released. It also holds the values
that the plan keeps. Its replay runs when backward first needs a value that it does not
hold. One replay makes all values needed later and frees intermediates at their last
use.

An inner region passes the values that it holds to the region around it, which holds or
drops them again. So an inner region has nothing at hand: any request, even one for a
region inside it, starts a replay. A replay first fetches all its roots and the values
passed through it, and frees each after its last use. While an inner region is alive, so
are those around it, and the values that the outermost one holds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from recoup.core.graph import (
    BEFORE,
    THROUGH,
    Claim,
    Graph,
    Integers,
    Save,
)
from recoup.core.replays import Passing, Replay, run_again, spikes
from recoup.core.segments import Action, Segment, recorded_operators


@dataclass(frozen=True, slots=True)
class Offload:
    """A storage that is on the host between forward and backward.

    Attributes:
        storage: Its number.
        leaves: The moment by which it has left the device.
        used: The moment that needs it back.
        released: The last moment at which it is held.
    """

    storage: int
    leaves: int
    used: int
    released: int


@dataclass
class Footprint:
    """The effect of segments on the memory and the time of a step.

    Attributes:
        holds: The last moment at which a storage is held, by storage.
        offloads: Storages that go to the host and come back.
        remade: Bytes that a replay leaves in use, or copies of overwritten values,
            each with its first and last moment.
        replays: The replays.
        recorded: The number of operators that forward records, counted once for each
            region; see `recorded_operators`.
        starts: The values each segment's replay starts from, inner segments first.
        passing: Storages that replays make and inner ones free.
    """

    holds: dict[int, int] = field(default_factory=dict[int, int])
    offloads: list[Offload] = field(default_factory=list[Offload])
    remade: list[tuple[int, int, int]] = field(
        default_factory=list[tuple[int, int, int]]
    )
    replays: list[Replay] = field(default_factory=list[Replay])
    recorded: int = 0
    starts: list[tuple[Segment, list[int]]] = field(
        default_factory=list[tuple[Segment, list[int]]]
    )
    passing: list[Passing] = field(default_factory=list[Passing])

    @property
    def replayed(self) -> int:
        """The number of operators that replays run."""
        return sum(len(replay.operations) for replay in self.replays)

    @cached_property
    def spikes(self) -> dict[int, int]:
        """The bytes of replays at a moment beyond all others in use there."""
        if len(self.replays) == 1 and not self.passing:  # for most options of planners
            (one,) = self.replays
            own_bytes = one.peak_bytes - one.left_bytes - one.fetched_bytes
            return {one.moment: max(0, own_bytes - one.awaited_bytes)}
        return spikes(self.replays, self.passing)

    @cached_property
    def held(self) -> tuple[Integers, Integers]:
        """The storages that are held, and the last moment of each."""
        count = len(self.holds)
        return (
            np.fromiter(self.holds.keys(), np.int64, count),
            np.fromiter(self.holds.values(), np.int64, count),
        )

    @cached_property
    def remade_spans(self) -> Integers:
        """The bytes that are remade, their first and last moments, as rows."""
        return np.array(self.remade, dtype=np.int64).reshape(-1, 3)

    def hold(self, graph: Graph, save: Save) -> None:
        """Keep a value's storage until it is released."""
        self.hold_until(graph.values[save.value].storage, save.released)

    def hold_until(self, storage: int, last: int) -> None:
        """Keep a storage until a moment, or longer."""
        if last > self.holds.get(storage, BEFORE):
            self.holds[storage] = last


def footprint(graph: Graph, segment: Segment) -> Footprint:
    """Return the effect of one outermost segment on memory and time.

    Costs time in proportion to the operators and saved tensors of the segment.
    """
    result = Footprint()
    add_segment(graph, segment, result)
    return result


def total_footprint(graph: Graph, segments: Sequence[Segment]) -> Footprint:
    """Return the footprint of all segments, and of autograd outside them.

    Examples:
        >>> total_footprint(Graph((), 0, (), (), (), (), ()), ()).replays
        []
    """
    total = Footprint()
    position = 0
    for segment in segments:
        first, last = graph.boundaries[segment.start], graph.boundaries[segment.stop]
        for save in graph.saves[position : first.saves]:
            total.hold(graph, save)
        position = last.saves
        add_segment(graph, segment, total)
    for save in graph.saves[position:]:
        total.hold(graph, save)
    for dropped in graph.dropped:
        producer = graph.values[dropped.value].producer
        inside = any(
            producer in graph.operations_between(segment.start, segment.stop)
            for segment in segments
        )
        if not inside:
            storage = graph.values[dropped.value].storage
            total.hold_until(storage, dropped.until)
    return total


def add_segment(graph: Graph, segment: Segment, total: Footprint) -> None:
    """Add the footprint of one outermost segment to a total."""
    planned: list[_Planned] = []
    before = len(total.passing)
    _add_region(graph, _Region(segment, 0), total, planned)
    _add_replays(graph, total, planned, total.passing[before:])
    if graph.dropped:
        _add_dropped(graph, segment, total)


def _add_dropped(graph: Graph, segment: Segment, total: Footprint) -> None:
    """Add the roots that a region holds for a replay that never runs."""
    inside = graph.operations_between(segment.start, segment.stop)
    mine = [d for d in graph.dropped if graph.values[d.value].producer in inside]
    if mine:
        values = [dropped.value for dropped in mine]
        _, roots = replayed(graph, inside, values, segment.actions)
        until = max(dropped.until for dropped in mine)
        for root in roots:
            total.hold_until(graph.values[root].storage, until)


class _Region(NamedTuple):
    """A segment at run time, and the number of segments around it."""

    segment: Segment
    depth: int


class _Planned(NamedTuple):
    """A replay whose peak is not known yet, and the storages that outlive it."""

    region: _Region
    moment: int
    operations: Sequence[int]
    wanted: set[int]
    left_bytes: int


def _add_region(
    graph: Graph, region: _Region, total: Footprint, planned: list[_Planned]
) -> list[Claim]:
    """Add a region to the total; return its possible claims on the one around it."""
    segment, depth = region
    if segment.by_call:
        _add_call(graph, segment, total)
        return []
    inside = graph.operations_between(segment.start, segment.stop)
    total.recorded += recorded_operators(len(inside), depth)
    for storage in graph.dying_inputs(inside):
        total.hold_until(storage, inside.stop - 1)
    claims, kept, end = _own_claims(graph, region)
    for inner in segment.inner:
        claims = claims + _add_region(graph, _Region(inner, depth + 1), total, planned)
    if segment.inner:
        end = max([claim.dies for claim in (*claims, *kept)], default=0)
    copied_bytes = _copied_bytes(graph, segment) if segment.inner else 0
    if copied_bytes:
        total.remade.append((copied_bytes, inside.stop, end))
    # The engine plans one replay for all saved values, held or not. Operators that
    # only lead to a held value are not part of it.
    demanded = [claim.value for claim in claims]
    operations, roots = replayed(graph, inside, demanded, segment.actions)
    total.starts.append((segment, roots))
    remade_by, held = graph.remade_by, segment.actions
    wanted = [
        claim
        for claim in claims
        if claim.value not in held and remade_by[claim.value] in inside
    ]
    # The region around holds the values of an inner one: reading them replays as well.
    first = min([c.used for c in (claims if depth else wanted)], default=end)
    if wanted:
        storages, left_bytes = _leave(graph, total, (first, depth), wanted)
        planned.append(_Planned(region, first, operations, storages, left_bytes))
    if depth:
        read = {value for n in operations for value in graph.operations[n].reads}
        gone = _last_uses(claims)
        for value in read.intersection(roots):
            gone[value] = max((first, depth), gone.get(value, (first, depth)))
        return [
            *(Claim(c.value, c.used, c.gone, end) for c in kept),
            *(Claim(value, first, gone[value], end) for value in roots),
        ]
    for claim in kept:
        total.hold_until(graph.storage_of[claim.value], end)
    for value in _held_here(graph, segment, total, roots, end):
        used = [claim.used for claim in claims if claim.value == value]
        is_read = any(value in graph.operations[n].reads for n in operations)
        moment = min([*used, first if is_read else end])
        storage = graph.values[value].storage
        total.offloads.append(Offload(storage, inside.stop, moment, end))
    return []


def _add_call(graph: Graph, segment: Segment, total: Footprint) -> None:
    """Add a call that is repeated in backward.

    It holds its inputs, records nothing, and runs all its operators again. Its values
    die as in forward, except those that autograd saves.
    """
    inside = graph.operations_between(segment.start, segment.stop)
    claims, kept, end = _own_claims(graph, _Region(segment, 0))
    inputs = {
        value
        for number in inside
        for value in graph.operations[number].reads
        if graph.values[value].producer not in inside
    }
    total.starts.append((segment, sorted(inputs)))
    for value in (*inputs, *(claim.value for claim in kept)):
        total.hold_until(graph.values[value].storage, end)
    if not claims:
        return
    first = min(claim.used for claim in (*claims, *kept))
    wanted, left_bytes = _leave(graph, total, (first, 0), claims)
    peak_bytes, seconds = run_again(graph, inside, wanted, by_call=True)
    awaited_bytes = graph.own_bytes[first] if graph.own_bytes else 0
    total.replays.append(
        Replay(
            segment,
            first,
            tuple(inside),
            peak_bytes,
            seconds,
            left_bytes=left_bytes,
            awaited_bytes=awaited_bytes,
        )
    )


class _OwnClaims(NamedTuple):
    """The values that autograd saves in a region, outside its inner regions.

    Attributes:
        claims: The claims on the region.
        kept: Those on values held elsewhere: made outside and, in an inner region,
            those that no replay makes.
        dies: The last moment of all.
    """

    claims: list[Claim]
    kept: list[Claim]
    dies: int


def _own_claims(graph: Graph, region: _Region) -> _OwnClaims:
    """Return the saved values of a region; cached for those without inner ones."""
    segment, depth = region
    key = segment.start, segment.stop, depth > 0
    if not segment.inner and key in graph.known_claims:
        return graph.known_claims[key]
    inside = graph.operations_between(segment.start, segment.stop)
    claims: list[Claim] = []
    kept: list[Claim] = []
    for claim in _own_saves(graph, segment):
        again, value = graph.remade_by[claim.value], graph.values[claim.value]
        is_mine = again in inside or (not depth and value.producer in inside)
        (claims if is_mine else kept).append(claim)
    dies = max([claim.dies for claim in (*claims, *kept)], default=0)
    found = _OwnClaims(claims, kept, dies)
    if not segment.inner:
        graph.known_claims[key] = found
    return found


def _held_here(
    graph: Graph, segment: Segment, total: Footprint, roots: Iterable[int], end: int
) -> list[int]:
    """Add the values that the outermost region holds; return the offloaded ones."""
    inside = graph.operations_between(segment.start, segment.stop)
    values, actions, holds = graph.values, segment.actions, total.holds
    away: list[int] = []
    for root in roots:
        value = values[root]
        if value.producer in inside:
            if actions.get(root) is Action.OFFLOAD:
                away.append(root)
                continue
        elif not value.holdable:
            # It is overwritten later: only a copy can be held.
            total.remade.append((graph.bytes_of(root), inside.start, end))
            continue
        # The body of `hold_until`, inlined: planners ask for many thousands.
        if end > holds.get(value.storage, BEFORE):
            holds[value.storage] = end
    return away


def _copied_bytes(graph: Graph, segment: Segment) -> int:
    """Return the bytes of running statistics that inner segments update.

    The outermost region holds a copy from its end on. A nested region with inner
    regions gets a copy of that copy, but only in backward, between a replay around it
    and its use. It is counted for the region's whole lifetime.
    """
    return sum(
        graph.operations[number].state_bytes
        for inner in segment.inner
        for number in graph.operations_between(inner.start, inner.stop)
    )


def _last_uses(claims: Iterable[Claim]) -> dict[int, tuple[int, int]]:
    """Return the time of the last claim on each value."""
    found: dict[int, tuple[int, int]] = {}
    for claim in claims:
        if claim.value not in found or claim.gone > found[claim.value]:
            found[claim.value] = claim.gone
    return found


def _own_saves(graph: Graph, segment: Segment) -> Sequence[Claim]:
    """Return the saves of autograd in the segment, outside its inner segments."""
    first, last = graph.boundaries[segment.start], graph.boundaries[segment.stop]
    if not segment.inner:
        return graph.claims[first.saves : last.saves]
    inner: set[int] = set()
    for child in segment.inner:
        inner.update(
            range(
                graph.boundaries[child.start].saves, graph.boundaries[child.stop].saves
            )
        )
    return [graph.claims[n] for n in range(first.saves, last.saves) if n not in inner]


def _leave(
    graph: Graph, total: Footprint, made: tuple[int, int], wanted: Sequence[Claim]
) -> tuple[set[int], int]:
    """Add the values that a replay leaves in use; they live until the last claim.

    Returns:
        The storages that outlive it; and the bytes still in use at its moment.
    """
    gone: dict[int, tuple[int, int]] = {}
    for claim in wanted:
        storage = graph.storage_of[claim.value]
        if storage not in gone or claim.gone > gone[storage]:
            gone[storage] = claim.gone
    moment = made[0]
    left_bytes = 0
    for storage, (until, depth) in gone.items():
        nbytes = graph.sizes[storage]
        last = until
        if depth != THROUGH:
            total.passing.append(Passing(storage, nbytes, made, (until, depth)))
            last -= 1
        if last >= moment:
            left_bytes += nbytes
            total.remade.append((nbytes, moment, last))
    return set(gone), left_bytes


def _add_replays(
    graph: Graph,
    total: Footprint,
    planned: Sequence[_Planned],
    passing: Sequence[Passing],
) -> None:
    """Add the costs of replays: each frees the values passed to it at their last use.

    Among several at one moment and depth, the last one is unknown.
    """
    places = [(one.moment, one.region.depth) for one in planned if passing]
    for one in planned:
        fetched: dict[int, int] = {}
        if places.count((one.moment, one.region.depth)) == 1:
            fetched = _fetched(graph, one, passing)
        peak_bytes, seconds = run_again(graph, one.operations, one.wanted, fetched)
        replay = Replay(
            one.region.segment,
            one.moment,
            tuple(one.operations),
            peak_bytes,
            seconds,
            left_bytes=one.left_bytes,
            awaited_bytes=graph.own_bytes[one.moment] if graph.own_bytes else 0,
            depth=one.region.depth,
            fetched_bytes=sum(fetched.values()),
        )
        total.replays.append(replay)


def _fetched(
    graph: Graph, replay: _Planned, passing: Sequence[Passing]
) -> dict[int, int]:
    """Return the storages that a replay frees, with their sizes.

    A storage that it writes to is excluded: it gets a copy.
    """
    place = (replay.moment, replay.region.depth)
    made = {
        graph.values[value].storage
        for number in replay.operations
        for value in graph.operations[number].makes
    }
    found = {one.storage: one.bytes for one in passing if one.gone == place}
    return {storage: n for storage, n in found.items() if storage not in made}


def replayed(
    graph: Graph, inside: range, demanded: Iterable[int], held: Mapping[int, object]
) -> tuple[list[int], list[int]]:
    """Return the operations that demanded values need, and the values these start from.

    Returns:
        The operations, in order; and the roots: values that these read or that are
        demanded, and that are held or come from outside.
    """
    remade_by, operations = graph.remade_by, graph.operations
    first, stop = inside.start, inside.stop
    required: set[int] = set()
    roots: dict[int, None] = {}
    stack = list(demanded)
    while stack:
        value = stack.pop()
        producer = remade_by[value]
        if not first <= producer < stop or value in held:
            roots[value] = None
        elif producer not in required:
            required.add(producer)
            stack.extend(operations[producer].reads)
    return sorted(required), list(roots)

"""Footprints: what segments hold, drop and replay. The rules are those of the engine.

A region holds what was made outside and is read by its replay until the last tensor
saved in it is released; so it holds what it was told to keep. Its replay runs when
backward first asks for a value that it does not hold, makes everything that is asked
for later at once, and frees what is only needed on the way at its last use. What an
inner region holds it passes on to the one around it, which holds it or drops it again:
it fetches all of that when it first needs any, and lets go of each after its last use.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from recoup.core.graph import BEFORE, Graph, Operation, Save
from recoup.core.segments import Action, Segment


@dataclass(frozen=True)
class Replay:
    """One replay of a segment.

    Attributes:
        segment: What is replayed.
        moment: The moment of backward before which it runs.
        operations: What runs, in order.
        peak_bytes: The most that its own values and workspaces take.
        seconds: How long it takes.
        left_bytes: What is still in use when it has run.
        awaited_bytes: What the operator of that moment takes, after the replay.
        depth: How many segments are around it.
    """

    segment: Segment
    moment: int
    operations: tuple[int, ...]
    peak_bytes: int
    seconds: float
    left_bytes: int = 0
    awaited_bytes: int = 0
    depth: int = 0


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
    """What some segments do to the memory and the time of a step.

    Attributes:
        holds: The last moment at which a storage is held, for those that are.
        offloads: What goes to the host and comes back.
        remade: Bytes that a replay leaves in use, or that are copied because they are
            written over, with the first and last moment.
        replays: What is run again.
        recorded: How many operators of forward are recorded, once for each region.
        starts: What each segment's replay starts from, inner segments first.
        passing: Bytes that inner replays before a moment start from and that are gone
            when the moment's operator runs.
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
    passing: dict[int, int] = field(default_factory=dict[int, int])

    def hold(self, graph: Graph, save: Save) -> None:
        """Keep a value's storage until it is released."""
        storage = graph.values[save.value].storage
        if save.released > self.holds.get(storage, BEFORE):
            self.holds[storage] = save.released


def footprint(graph: Graph, segment: Segment) -> Footprint:
    """Return what one segment that is in no other does to memory and time.

    Costs time in proportion to the operators and saved tensors of the segment.
    """
    result = Footprint()
    add_segment(graph, segment, result)
    return result


def replayed(
    graph: Graph, inside: range, demanded: Iterable[int], held: Mapping[int, object]
) -> tuple[list[int], list[int]]:
    """Return the operations that demanded values need, and the values these start from.

    Args:
        graph: The step.
        inside: The operations of the segment.
        demanded: The values to make.
        held: The values made in the segment that are held.

    Returns:
        The operations, in order; and what they read, or what is demanded, that is held
        or comes from outside.
    """
    required: set[int] = set()
    roots: dict[int, None] = {}
    stack = list(demanded)
    while stack:
        value = stack.pop()
        producer = graph.values[value].producer
        if (
            producer not in inside
            or value in held
            or not graph.operations[producer].replayable
        ):
            roots[value] = None
        elif producer not in required:
            required.add(producer)
            stack.extend(graph.operations[producer].reads)
    return sorted(required), list(roots)


def total_footprint(graph: Graph, segments: Sequence[Segment]) -> Footprint:
    """Return what all segments, and autograd outside of them, hold and replay.

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
    return total


def add_segment(graph: Graph, segment: Segment, total: Footprint) -> None:
    """Add what one segment that is in no other does to what others do."""
    for save in _run_segment(graph, segment, total, depth=0):
        total.hold(graph, save)


def _run_segment(
    graph: Graph, segment: Segment, total: Footprint, *, depth: int
) -> list[Save]:
    """Account for a segment; return what it asks of those around it."""
    inside = graph.operations_between(segment.start, segment.stop)
    own = _own_saves(graph, segment)
    total.recorded += len(inside)
    for inner in segment.inner:
        own.extend(_run_segment(graph, inner, total, depth=depth + 1))
    made = [s for s in own if graph.values[s.value].producer in inside]
    nested = depth > 0
    end = max((_last_use(save) for save in own), default=0)
    asked = [
        save if nested else Save(save.value, save.used, end)
        for save in own
        if graph.values[save.value].producer not in inside
    ]
    copied_bytes = _copied_bytes(graph, segment)
    if copied_bytes:
        total.remade.append((copied_bytes, inside.stop, end))
    if not made:
        total.starts.append((segment, []))
        return asked
    wanted = [s for s in made if not _is_held(graph, segment, s.value)]
    # The engine plans one replay for all that is saved, held or not: what leads to a
    # held value is not part of it.
    operations, roots = replayed(
        graph, inside, [save.value for save in made], segment.actions
    )
    total.starts.append((segment, roots))
    # What a nested one holds is with those around it: asking for that, too, replays.
    first = min((s.used for s in (made if nested else wanted)), default=end)
    used = {} if nested else _first_uses(made)
    released = _last_uses(made) if nested else {}
    read = {value for number in operations for value in graph.operations[number].reads}
    for value in roots:
        if nested:
            # What only the replay reads is gone when it has run, before `first` does.
            asked.append(Save(value, first, released.get(value, first - 1)))
            continue
        moment = min(used.get(value, end), first if value in read else end)
        offloaded = segment.actions.get(value) is Action.OFFLOAD
        if offloaded and graph.values[value].producer in inside:
            storage = graph.values[value].storage
            total.offloads.append(Offload(storage, inside.stop, moment, end))
        elif graph.values[value].producer not in inside and _is_spoilt(graph, value):
            total.remade.append((graph.bytes_of(value), inside.start, end))
        else:
            asked.append(Save(value, moment, end))
    if wanted:
        planned = Replay(segment, first, tuple(operations), 0, 0.0, depth=depth)
        _add_replay(graph, total, planned, wanted)
    return asked


def _copied_bytes(graph: Graph, segment: Segment) -> int:
    """Return the bytes of running statistics that inner segments update."""
    return sum(
        graph.operations[number].state_bytes
        for inner in segment.inner
        for number in graph.operations_between(inner.start, inner.stop)
    )


def _first_uses(saves: Iterable[Save]) -> dict[int, int]:
    """Return the first moment at which each value is asked for."""
    found: dict[int, int] = {}
    for save in saves:
        if save.value not in found or save.used < found[save.value]:
            found[save.value] = save.used
    return found


def _last_uses(saves: Iterable[Save]) -> dict[int, int]:
    """Return the last moment at which each value is asked for or held."""
    found: dict[int, int] = {}
    for save in saves:
        last = _last_use(save)
        if save.value not in found or last > found[save.value]:
            found[save.value] = last
    return found


def _last_use(save: Save) -> int:
    """Return the last moment at which a value is asked for or held."""
    return save.released if save.released >= save.used else save.used


def without_idle_actions(graph: Graph, segment: Segment) -> Segment:
    """Return the segment without actions on values that nothing starts from.

    Neither backward nor a replay needs these, but a region would hold them. What the
    segment costs stays the same.

    Examples:
        >>> from recoup.core.graph import Boundary
        >>> segment = Segment(0, 1, {3: Action.KEEP})
        >>> places = (Boundary(0, 0), Boundary(0, 0))
        >>> empty = Graph((), 0, (), (), (), places, ())
        >>> without_idle_actions(empty, segment).actions
        {}
    """
    starts = iter(footprint(graph, segment).starts)

    def rebuilt(segment: Segment) -> Segment:
        inner = tuple(rebuilt(child) for child in segment.inner)
        _, roots = next(starts)
        used = set(roots)
        actions = {v: a for v, a in segment.actions.items() if v in used}
        return Segment(segment.start, segment.stop, actions, inner)

    return rebuilt(segment)


def _is_spoilt(graph: Graph, value: int) -> bool:
    """Return whether a value is written over, so that only a copy can be held."""
    return not graph.values[value].holdable


def _own_saves(graph: Graph, segment: Segment) -> list[Save]:
    """Return what autograd saves in the segment but in none of its inner ones."""
    first, last = graph.boundaries[segment.start], graph.boundaries[segment.stop]
    if not segment.inner:
        return list(graph.saves[first.saves : last.saves])
    inner: set[int] = set()
    for child in segment.inner:
        inner.update(
            range(
                graph.boundaries[child.start].saves, graph.boundaries[child.stop].saves
            )
        )
    return [graph.saves[n] for n in range(first.saves, last.saves) if n not in inner]


def _is_held(graph: Graph, segment: Segment, value: int) -> bool:
    producer = graph.values[value].producer
    return value in segment.actions or not graph.operations[producer].replayable


def _add_replay(
    graph: Graph, total: Footprint, planned: Replay, wanted: Sequence[Save]
) -> None:
    """Account for a replay: its values live on until they are released."""
    moment = planned.moment
    released: dict[int, int] = {}
    fetched: dict[int, int] = {}
    for save in wanted:
        storage = graph.values[save.value].storage
        until = max(save.replayed_until, released.get(storage, moment - 1))
        released[storage] = until
        if save.released < save.used:
            fetched[storage] = max(save.used, fetched.get(storage, moment))
    peak_bytes, seconds = run_again(graph, planned.operations, set(released))
    left_bytes = 0
    for storage, until in released.items():
        nbytes = graph.storages[storage].bytes
        if fetched.get(storage, until) > until:
            passes = fetched[storage]
            total.passing[passes] = total.passing.get(passes, 0) + nbytes
        if until >= moment:
            left_bytes += nbytes
            total.remade.append((nbytes, moment, until))
    total.replays.append(
        replace(
            planned,
            peak_bytes=peak_bytes,
            seconds=seconds,
            left_bytes=left_bytes,
            awaited_bytes=graph.own_bytes[moment] if graph.own_bytes else 0,
        )
    )


def run_again(
    graph: Graph, operations: Sequence[int], wanted: set[int]
) -> tuple[int, float]:
    """Return the peak bytes and the seconds of running operations again.

    Args:
        graph: The step.
        operations: What runs, in order.
        wanted: The storages that outlive the replay.
    """
    last: dict[int, int] = {}
    for number in operations:
        for value in _mentioned(graph.operations[number]):
            last[graph.values[value].storage] = number
    live: set[int] = set()
    live_bytes = peak_bytes = 0
    seconds = 0.0
    for number in operations:
        operation = graph.operations[number]
        for value in operation.makes:
            storage = graph.values[value].storage
            if storage not in live:
                live.add(storage)
                live_bytes += graph.storages[storage].bytes
        peak_bytes = max(peak_bytes, live_bytes + operation.workspace_bytes)
        seconds += operation.seconds
        for value in _mentioned(operation):
            storage = graph.values[value].storage
            if storage in live and storage not in wanted and last[storage] == number:
                live.discard(storage)
                live_bytes -= graph.storages[storage].bytes
    return peak_bytes, seconds


def _mentioned(operation: Operation) -> tuple[int, ...]:
    return operation.reads + operation.makes


def spikes_of(total: Footprint) -> dict[int, int]:
    """Return what replays take at a moment beyond all that is in use there.

    A segment is replayed after the one around it, whose values it starts from: what
    the inner one leaves is not there yet when the outer one runs. Nothing is assumed
    about the order of segments that lie side by side. All of them run before the
    moment's operator, and meet nothing of what that takes.
    """
    at: dict[int, list[Replay]] = {}
    for replay in total.replays:
        at.setdefault(replay.moment, []).append(replay)
    spikes: dict[int, int] = {}
    for moment, together in at.items():
        after = 0
        peak = 0
        for depth in sorted({replay.depth for replay in together}):
            level = [replay for replay in together if replay.depth == depth]
            after += sum(replay.left_bytes for replay in level)
            spike = max(replay.peak_bytes - replay.left_bytes for replay in level)
            passing = total.passing.get(moment, 0) if depth else 0
            peak = max(peak, after + spike + passing)
        awaited = min(replay.awaited_bytes for replay in together)
        spikes[moment] = max(0, peak - after - awaited)
    return spikes

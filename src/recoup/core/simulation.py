"""What a plan costs: the one definition of its peak and of its time.

The rules are those of the engine. A region holds what was made outside and is read
by its replay until the last tensor saved in it is released; so it holds what it was
told to keep. Its replay runs when backward first asks for a value that it does not
hold, makes everything that is asked for later at once, and frees what is only needed on
the way at its last use. What an inner region holds it passes on to the one around it,
which holds it or drops it again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from recoup.core.graph import Graph, Operation, Save
from recoup.core.segments import Action, Segment, check_order


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
        depth: How many segments are around it.
    """

    segment: Segment
    moment: int
    operations: tuple[int, ...]
    peak_bytes: int
    seconds: float
    left_bytes: int = 0
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
        remade: Bytes that a replay leaves in use, with the first and last moment.
        replays: What is run again.
    """

    holds: dict[int, int] = field(default_factory=dict[int, int])
    offloads: list[Offload] = field(default_factory=list[Offload])
    remade: list[tuple[int, int, int]] = field(
        default_factory=list[tuple[int, int, int]]
    )
    replays: list[Replay] = field(default_factory=list[Replay])

    def hold(self, graph: Graph, save: Save) -> None:
        """Keep a value's storage until it is released."""
        storage = graph.values[save.value].storage
        self.holds[storage] = max(self.holds.get(storage, -1), save.released)


@dataclass(frozen=True)
class Simulation:
    """What a plan costs.

    Attributes:
        bytes_at: The bytes in use at each moment; a replay counts at the moment before
            which it runs.
        replays: What is run again.
        held_bytes: What segments hold between forward and backward, on the device.
        host_bytes: What is copied to the host and back.
        stall_seconds: The copying that does not hide behind computing.
        step_seconds: The step without replays and stalls.
    """

    bytes_at: tuple[int, ...]
    replays: tuple[Replay, ...]
    held_bytes: int
    host_bytes: int
    stall_seconds: float
    step_seconds: float

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use at any moment."""
        return max(self.bytes_at, default=0)

    @property
    def peak_moment(self) -> int:
        """The first moment at which that many bytes are in use."""
        return self.bytes_at.index(self.peak_bytes)

    @property
    def replay_seconds(self) -> float:
        """How long all replays take."""
        return sum(replay.seconds for replay in self.replays)

    @property
    def seconds(self) -> float:
        """How long the step takes."""
        return self.step_seconds + self.replay_seconds + self.stall_seconds


def simulate(graph: Graph, segments: Sequence[Segment]) -> Simulation:
    """Return what a step costs whose forward runs in these segments.

    Costs time in proportion to the operators and saved tensors.

    Raises:
        UsageError: The segments overlap or are out of order.

    Examples:
        Four operators, each saves its result of 100 bytes; nothing else is in use.

        >>> from recoup.core.graph import Boundary, Storage, Value
        >>> results = tuple(Storage(100, i, min(i + 1, 3)) for i in range(4))
        >>> graph = Graph(
        ...     operations=tuple(
        ...         Operation("exp", 1.0, (i,), (i + 1,)) for i in range(4)
        ...     ),
        ...     backward=4,
        ...     storages=(Storage(0, -1, 7), *results),
        ...     values=tuple(Value(i, i - 1) for i in range(5)),
        ...     saves=tuple(Save(i + 1, 7 - i, 7 - i) for i in range(4)),
        ...     boundaries=(Boundary(0, 0), Boundary(2, 2), Boundary(4, 4)),
        ...     other_bytes=(0,) * 8,
        ... )
        >>> simulate(graph, []).bytes_at
        (100, 200, 300, 400, 400, 300, 200, 100)
        >>> plan = simulate(graph, [Segment(0, 1), Segment(1, 2)])
        >>> plan.bytes_at, plan.replay_seconds
        ((100, 200, 200, 300, 300, 200, 200, 100), 4.0)
    """
    check_order(segments, 0, len(graph.boundaries) - 1)
    total = Footprint()
    position = 0
    for segment in segments:
        first, last = graph.boundaries[segment.start], graph.boundaries[segment.stop]
        for save in graph.saves[position : first.saves]:
            total.hold(graph, save)
        position = last.saves
        _add_segment(graph, segment, total)
    for save in graph.saves[position:]:
        total.hold(graph, save)
    return add_up(graph, total)


def footprint(graph: Graph, segment: Segment) -> Footprint:
    """Return what one segment that is in no other does to memory and time.

    Costs time in proportion to the operators and saved tensors of the segment.
    """
    result = Footprint()
    _add_segment(graph, segment, result)
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


def _add_segment(graph: Graph, segment: Segment, total: Footprint) -> None:
    for save in _run_segment(graph, segment, total, depth=0):
        total.hold(graph, save)


def _run_segment(
    graph: Graph, segment: Segment, total: Footprint, *, depth: int
) -> list[Save]:
    """Account for a segment; return what it asks of those around it."""
    inside = graph.operations_between(segment.start, segment.stop)
    own = _own_saves(graph, segment)
    for inner in segment.inner:
        own.extend(_run_segment(graph, inner, total, depth=depth + 1))
    made = [s for s in own if graph.values[s.value].producer in inside]
    asked = [s for s in own if graph.values[s.value].producer not in inside]
    if not made:
        return asked
    wanted = [s for s in made if not _is_held(graph, segment, s.value)]
    # The engine plans one replay for all that is saved, held or not: what leads to a
    # held value is not part of it.
    operations, roots = replayed(
        graph, inside, [save.value for save in made], segment.actions
    )
    end = max(save.released for save in made)
    first = min((save.used for save in wanted), default=end)
    used: dict[int, int] = {}
    for save in made:
        used[save.value] = min(save.used, used.get(save.value, save.used))
    read = {value for number in operations for value in graph.operations[number].reads}
    for value in roots:
        moment = min(used.get(value, end), first if value in read else end)
        offloaded = segment.actions.get(value) is Action.OFFLOAD
        if offloaded and depth == 0 and graph.values[value].producer in inside:
            storage = graph.values[value].storage
            total.offloads.append(Offload(storage, inside.stop, moment, end))
        else:
            asked.append(Save(value, moment, end))
    if wanted:
        _add_replay(graph, segment, total, operations, wanted, depth)
    return asked


def _own_saves(graph: Graph, segment: Segment) -> list[Save]:
    """Return what autograd saves in the segment but in none of its inner ones."""
    first, last = graph.boundaries[segment.start], graph.boundaries[segment.stop]
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
    graph: Graph,
    segment: Segment,
    total: Footprint,
    operations: Sequence[int],
    wanted: Sequence[Save],
    depth: int,
) -> None:
    """Account for a replay: its values live on until they are released."""
    moment = min(save.used for save in wanted)
    released: dict[int, int] = {}
    for save in wanted:
        storage = graph.values[save.value].storage
        released[storage] = max(released.get(storage, moment), save.released)
    peak_bytes, seconds = run_again(graph, operations, set(released))
    left_bytes = 0
    for storage, until in released.items():
        nbytes = graph.storages[storage].bytes
        left_bytes += nbytes
        total.remade.append((nbytes, moment, until))
    total.replays.append(
        Replay(
            segment, moment, tuple(operations), peak_bytes, seconds, left_bytes, depth
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


def add_up(graph: Graph, total: Footprint) -> Simulation:
    """Return what a step costs in which segments have this footprint together."""
    half = len(graph.operations)
    changes = [0] * (graph.moments + 1)

    def add(nbytes: int, first: int, last: int) -> None:
        changes[first] += nbytes
        changes[min(last, graph.moments - 1) + 1] -= nbytes

    until = [storage.dies for storage in graph.storages]
    for storage, last in total.holds.items():
        until[storage] = max(until[storage], last)
    host_bytes = 0
    for offload in _merged(total.offloads):
        if until[offload.storage] >= half:
            continue  # somebody holds it on the device in any case
        nbytes = graph.storages[offload.storage].bytes
        host_bytes += nbytes
        leaves = min(offload.leaves, half) - 1
        until[offload.storage] = max(until[offload.storage], leaves)
        add(nbytes, max(offload.used - 1, half), offload.released)
    held_bytes = 0
    for storage, last in zip(graph.storages, until, strict=True):
        if not storage.bytes:
            continue
        if storage.born < half <= last:
            held_bytes += storage.bytes
        add(storage.bytes, max(storage.born, 0), last)
    for nbytes, first, last in total.remade:
        add(nbytes, first, last)
    spikes = spikes_of(total.replays)
    live_bytes = 0
    bytes_at: list[int] = []
    for moment, other in enumerate(graph.other_bytes):
        live_bytes += changes[moment]
        bytes_at.append(live_bytes + other + spikes.get(moment, 0))
    return Simulation(
        bytes_at=tuple(bytes_at),
        replays=tuple(total.replays),
        held_bytes=held_bytes,
        host_bytes=host_bytes,
        stall_seconds=stall_seconds(graph, host_bytes),
        step_seconds=graph.step_seconds,
    )


def _merged(offloads: Iterable[Offload]) -> Iterable[Offload]:
    """Return the offloads, those of one storage as one."""
    found: dict[int, Offload] = {}
    for offload in offloads:
        other = found.get(offload.storage, offload)
        found[offload.storage] = Offload(
            offload.storage,
            max(offload.leaves, other.leaves),
            min(offload.used, other.used),
            max(offload.released, other.released),
        )
    return found.values()


def spikes_of(replays: Sequence[Replay]) -> dict[int, int]:
    """Return what replays take at a moment beyond all that they leave there.

    A segment is replayed after the one around it, whose values it starts from: what
    the inner one leaves is not there yet when the outer one runs. Nothing is assumed
    about the order of segments that lie side by side.
    """
    at: dict[int, list[Replay]] = {}
    for replay in replays:
        at.setdefault(replay.moment, []).append(replay)
    spikes: dict[int, int] = {}
    for moment, together in at.items():
        before = after = 0
        peak = 0
        for depth in sorted({replay.depth for replay in together}):
            level = [replay for replay in together if replay.depth == depth]
            after = before + sum(replay.left_bytes for replay in level)
            spike = max(replay.peak_bytes - replay.left_bytes for replay in level)
            peak = max(peak, after + spike)
            before = after
        spikes[moment] = max(0, peak - after)
    return spikes


def stall_seconds(graph: Graph, host_bytes: int) -> float:
    """Return how long the step waits for copies, out in forward and in in backward.

    Copies run beside the computing: what does not fit into a third of the step on the
    way out (forward), or two thirds on the way in (backward), is waited for.
    """
    if not host_bytes:
        return 0.0
    if not graph.link_bytes_per_second:
        return float("inf")
    copy_seconds = host_bytes / graph.link_bytes_per_second
    return max(0.0, copy_seconds - graph.step_seconds / 3) + max(
        0.0, copy_seconds - 2 * graph.step_seconds / 3
    )

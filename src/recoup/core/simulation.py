"""What a plan costs: the one definition of its peak and of its time.

The rules are those of the engine. A region holds what was made outside and is read
by its replay until the last tensor saved in it is released; so it holds what it was
told to keep. Its replay runs when backward first asks for a value that it does not
hold, makes everything that is asked for later at once, and frees what is only needed on
the way at its last use.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
    """

    segment: Segment
    moment: int
    operations: tuple[int, ...]
    peak_bytes: int
    seconds: float


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
    ledger = _Ledger(graph)
    replays: list[Replay] = []
    covered: set[int] = set()
    for segment in segments:
        first, last = graph.boundaries[segment.start], graph.boundaries[segment.stop]
        covered.update(range(first.saves, last.saves))
        saves = _run_segment(segment, ledger, replays)
        for save in saves:
            ledger.hold(save)
    for number, save in enumerate(graph.saves):
        if number not in covered:
            ledger.hold(save)
    return ledger.close(replays)


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


def _run_segment(
    segment: Segment, ledger: "_Ledger", replays: list[Replay]
) -> list[Save]:
    """Account for a segment; return what it asks of those around it."""
    graph = ledger.graph
    inside = graph.operations_between(segment.start, segment.stop)
    own = _own_saves(graph, segment)
    for inner in segment.inner:
        own.extend(_run_segment(inner, ledger, replays))
    made = [s for s in own if graph.values[s.value].producer in inside]
    asked = [s for s in own if graph.values[s.value].producer not in inside]
    wanted = [s for s in made if not _is_held(graph, segment, s.value)]
    operations, roots = replayed(
        graph, inside, [save.value for save in made], segment.actions
    )
    if not made:
        return asked
    end = max(save.released for save in made)
    first = min((save.used for save in wanted), default=end)
    for value in roots:
        producer = graph.values[value].producer
        used = min([s.used for s in made if s.value == value], default=first)
        root = Save(value, used, end)
        if producer not in inside:
            asked.append(root)
        elif segment.actions.get(value) is Action.OFFLOAD:
            ledger.offload(root, inside.stop)
        else:
            ledger.hold(root)
    if wanted:
        replays.append(_replay(segment, ledger, operations, wanted))
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


def _replay(
    segment: Segment, ledger: "_Ledger", operations: Sequence[int], wanted: list[Save]
) -> Replay:
    """Account for a replay: its values live on until they are released."""
    graph = ledger.graph
    moment = min(save.used for save in wanted)
    released: dict[int, int] = {}
    for save in wanted:
        storage = graph.values[save.value].storage
        released[storage] = max(released.get(storage, moment), save.released)
    peak_bytes, seconds = run_again(graph, operations, set(released))
    for storage, until in released.items():
        ledger.add(graph.storages[storage].bytes, moment, until)
    ledger.spike(moment, peak_bytes - sum(graph.storages[s].bytes for s in released))
    return Replay(segment, moment, tuple(operations), peak_bytes, seconds)


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


class _Ledger:
    """Adds up what is in use at each moment."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._until = [storage.dies for storage in graph.storages]
        self._changes = [0] * (graph.moments + 1)
        self._spikes: dict[int, int] = {}
        self._offloaded: list[tuple[Save, int]] = []

    def add(self, nbytes: int, first: int, last: int) -> None:
        """Count bytes from the first moment to the last."""
        self._changes[first] += nbytes
        self._changes[last + 1] -= nbytes

    def spike(self, moment: int, nbytes: int) -> None:
        """Count bytes that are in use for part of a moment, beyond the others."""
        self._spikes[moment] = max(self._spikes.get(moment, 0), nbytes)

    def hold(self, save: Save) -> None:
        """Keep a value's storage until it is released."""
        storage = self.graph.values[save.value].storage
        self._until[storage] = max(self._until[storage], save.released)

    def offload(self, save: Save, leaves: int) -> None:
        """Keep a value on the host between forward and backward."""
        self._offloaded.append((save, leaves))

    def close(self, replays: list[Replay]) -> Simulation:
        """Return what it all came to."""
        graph = self.graph
        half = len(graph.operations)
        host_bytes = 0
        out_at: dict[int, int] = {}
        for save, leaves in self._offloaded:
            storage = graph.values[save.value].storage
            if self._until[storage] >= half:
                continue  # somebody holds it on the device in any case
            nbytes = graph.storages[storage].bytes
            if nbytes and storage not in out_at:
                host_bytes += nbytes
                out_at[storage] = leaves
            self._until[storage] = max(self._until[storage], min(leaves, half) - 1)
            self.add(nbytes, max(save.used - 1, half), save.released)
        held_bytes = 0
        for storage, until in zip(graph.storages, self._until, strict=True):
            if not storage.bytes:
                continue
            if storage.born < half <= until:
                held_bytes += storage.bytes
            self.add(storage.bytes, max(storage.born, 0), min(until, graph.moments - 1))
        live_bytes = 0
        bytes_at: list[int] = []
        for moment, other in enumerate(graph.other_bytes):
            live_bytes += self._changes[moment]
            bytes_at.append(live_bytes + other + self._spikes.get(moment, 0))
        return Simulation(
            bytes_at=tuple(bytes_at),
            replays=tuple(replays),
            held_bytes=held_bytes,
            host_bytes=host_bytes,
            stall_seconds=_stall_seconds(graph, host_bytes),
            step_seconds=graph.step_seconds,
        )


def _stall_seconds(graph: Graph, host_bytes: int) -> float:
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

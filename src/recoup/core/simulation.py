"""The cost of a plan: the one definition of its peak and of its time.

`recoup.core.footprint` defines the values that segments hold and replay, and
`recoup.core.memory_use` their bytes at each moment.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from recoup.core.display import as_html
from recoup.core.footprint import Footprint, total_footprint
from recoup.core.graph import BEFORE, Graph
from recoup.core.memory_use import SPIKE, MemoryUse
from recoup.core.replays import Replay
from recoup.core.segments import Segment, check_order
from recoup.core.units import print_bytes, print_seconds


@dataclass(frozen=True, repr=False)
class Simulation:
    """The cost of a plan.

    Attributes:
        bytes_at: The bytes in use at each moment; a replay counts at the moment before
            which it runs.
        settled_at: The same without the temporaries of replays.
        replays: The replays.
        held_bytes: Bytes held on the device between forward and backward.
        host_bytes: Bytes copied to the host and back.
        stall_seconds: The time of copies that computation does not hide.
        step_seconds: The step without replays, stalls and recording.
        recording_seconds: The time that regions add to forward.
        host_seconds: The host's time with an accelerator.
        plain_host_seconds: The host's time without the plan.
    """

    bytes_at: tuple[int, ...]
    settled_at: tuple[int, ...]
    replays: tuple[Replay, ...]
    held_bytes: int
    host_bytes: int
    stall_seconds: float
    step_seconds: float
    recording_seconds: float = 0.0
    host_seconds: float = 0.0
    plain_host_seconds: float = 0.0

    def __repr__(self) -> str:
        return (
            f"Simulation(peak {print_bytes(self.peak_bytes)}, step "
            f"{print_seconds(self.seconds)}, of that {len(self.replays)} replays "
            f"{print_seconds(self.replay_seconds)})"
        )

    def _repr_html_(self) -> str:
        return as_html(repr(self), self.bytes_at)

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use at any moment."""
        return max(self.bytes_at, default=0)

    @property
    def peak_moment(self) -> int:
        """The first moment of the peak."""
        return self.bytes_at.index(self.peak_bytes)

    @property
    def replay_seconds(self) -> float:
        """The time of all replays."""
        return sum(replay.seconds for replay in self.replays)

    @property
    def device_seconds(self) -> float:
        """The time of the step on the device."""
        added = self.replay_seconds + self.recording_seconds + self.stall_seconds
        return self.step_seconds + added

    @property
    def seconds(self) -> float:
        """The time of the step: that of the slower of device and host."""
        return max(self.device_seconds, self.host_seconds)

    @property
    def extra_seconds(self) -> float:
        """The time that the plan adds: replays, recording, waiting for copies."""
        return self.seconds - max(self.step_seconds, self.plain_host_seconds)


def simulate(graph: Graph, segments: Sequence[Segment]) -> Simulation:
    """Return the cost of a step whose forward runs in these segments.

    Costs time in proportion to the operators and saved tensors.

    Raises:
        UsageError: The segments overlap or are out of order.

    Examples:
        Four operators, each saves its result of 100 bytes; nothing else is in use.

        >>> from recoup.core.graph import Boundary, Operation, Save, Storage, Value
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
    return add_up(graph, total_footprint(graph, segments))


def live_after(graph: Graph, segments: Sequence[Segment], operations: range) -> int:
    """Return the bytes made by some operations of forward that outlive the last."""
    holds = total_footprint(graph, segments).holds
    return sum(
        storage.bytes
        for number, storage in enumerate(graph.storages)
        if storage.born in operations
        and max(storage.dies, holds.get(number, BEFORE)) >= operations.stop
    )


@dataclass(frozen=True, slots=True)
class Kept:
    """Memory that a training loop keeps and that the measured step did not have.

    Attributes:
        gradients: The bytes of the gradients of earlier backward passes, by parameter.
        other_bytes: All other bytes.
    """

    gradients: Mapping[str, int]
    other_bytes: int = 0


class LoopKept(NamedTuple):
    """Memory that a training loop keeps, by part of a step.

    Attributes:
        call: During the first call of the model.
        loss: From then until backward.
        backward: During backward.
    """

    call: Kept
    loss: Kept
    backward: Kept

    def beyond(self, graph: Graph) -> "LoopKept":
        """Return the same without gradients that exist at the measured step's start.

        Examples:
            >>> graph = Graph((), 0, (), (), (), (), (), gradients=(("w", BEFORE),))
            >>> kept = Kept({"v": 1, "w": 2}, 3)
            >>> LoopKept(kept, kept, kept).beyond(graph).loss
            Kept(gradients={'v': 1}, other_bytes=3)
        """
        counted = {name for name, first in graph.gradients if first == BEFORE}
        return LoopKept(
            *(
                Kept(
                    {n: b for n, b in part.gradients.items() if n not in counted},
                    part.other_bytes,
                )
                for part in self
            )
        )


def peak_with(graph: Graph, segments: Sequence[Segment], kept: LoopKept) -> int:
    """Return the peak of a step whose training loop keeps more than was measured.

    A gradient that exists at a moment of the measured step is already counted there:
    later passes add to it in place.

    Examples:
        One moment of forward, two of backward; the gradient of `w` exists at the
        last.

        >>> from recoup.core.graph import Boundary, Operation
        >>> graph = Graph(
        ...     operations=(Operation("exp", 1.0, (), ()),),
        ...     backward=2,
        ...     storages=(),
        ...     values=(),
        ...     saves=(),
        ...     boundaries=(Boundary(0, 0), Boundary(1, 0)),
        ...     other_bytes=(5, 9, 11),
        ...     gradients=(("w", 2),),
        ... )
        >>> nothing, gradient = Kept({}), Kept({"w": 4})
        >>> peak_with(graph, (), LoopKept(nothing, nothing, gradient))
        13
        >>> peak_with(graph, (), LoopKept(gradient, gradient, Kept({}, 1)))
        12
    """
    half = len(graph.operations)
    stop = graph.operations_of_call(0).stop
    added = [
        *_added(graph, kept.call)[:stop],
        *_added(graph, kept.loss)[stop:half],
        *_added(graph, kept.backward)[half:],
    ]
    moments = simulate(graph, segments).bytes_at
    return max(map(int.__add__, moments, added), default=0)


def _added(graph: Graph, kept: Kept) -> list[int]:
    """Return the bytes at each moment that the measured step does not count."""
    first = dict(graph.gradients)
    ends: Counter[int] = Counter()
    for name, nbytes in kept.gradients.items():
        ends[max(0, first.get(name, graph.moments))] += nbytes
    left = kept.other_bytes + ends.total()
    return [left := left - ends[moment] for moment in range(graph.moments)]


def add_up(graph: Graph, total: Footprint) -> Simulation:
    """Return the cost of a step in which the segments have this total footprint."""
    half = len(graph.operations)
    use = MemoryUse(graph)
    spans = use.spans([total])
    settled = spans.only(spans.source != SPIKE).at_all(graph.moments)
    settled += np.array(graph.other_bytes, dtype=np.int64)
    with_spikes = settled.copy()
    for moment, nbytes in total.spikes.items():
        with_spikes[moment] += nbytes
    sizes, born, _ = graph.arrays
    until = spans.last[: len(sizes)]
    host_bytes = use.host_bytes([total])
    host_costs = graph.host_costs
    return Simulation(
        bytes_at=tuple(with_spikes.tolist()),
        settled_at=tuple(settled.tolist()),
        replays=tuple(total.replays),
        held_bytes=int(sizes[(born < half) & (until >= half)].sum()),
        host_bytes=host_bytes,
        stall_seconds=stall_seconds(graph, host_bytes),
        step_seconds=graph.step_seconds,
        recording_seconds=total.recorded * graph.recording_seconds,
        host_seconds=(
            host_costs.seconds(total.recorded, total.replayed) if host_costs else 0.0
        ),
        plain_host_seconds=host_costs.plain_seconds if host_costs else 0.0,
    )


def stall_seconds(graph: Graph, host_bytes: int) -> float:
    """Return the time that the step waits for copies to and from the host.

    Copies overlap with computation. The step waits for copies that exceed a third of
    its time on the way out (forward), or two thirds on the way in (backward).
    """
    if not host_bytes:
        return 0.0
    if not graph.link_bytes_per_second:
        return float("inf")
    copy_seconds = host_bytes / graph.link_bytes_per_second
    return max(0.0, copy_seconds - graph.step_seconds / 3) + max(
        0.0, copy_seconds - 2 * graph.step_seconds / 3
    )

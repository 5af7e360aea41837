"""The graph of one training step: operators, memory, and tensors that autograd saves.

A step is a sequence of *moments*: the operators of forward in order, then those of
backward. Everything else refers to them by number.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recoup.core.display import as_html
from recoup.core.units import print_bytes, print_seconds
from recoup.errors import UsageError

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

BEFORE = -1
"""The producer of a value that existed before the step."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A piece of memory that an operator of forward allocated, or an input.

    Attributes:
        bytes: Its size; 0 if it is alive in any case (parameters, the batch).
        born: The moment that allocated it; `BEFORE` if it existed before.
        dies: The last moment at which something other than autograd or a region
            refers to it.
    """

    bytes: int
    born: int
    dies: int


@dataclass(frozen=True, slots=True)
class Value:
    """A storage at one version.

    Attributes:
        storage: The number of its storage.
        producer: The operation that made it, or `BEFORE`.
        holdable: Whether it may be held: nothing overwrites it later.
    """

    storage: int
    producer: int
    holdable: bool = True


@dataclass(frozen=True, slots=True)
class Operation:
    """An operator of forward.

    Attributes:
        name: The operator, as `aten.mm.default`.
        seconds: The time to recompute it.
        reads: The values it takes.
        makes: The values it makes.
        replayable: Whether it can be recomputed; if not, results are held if needed.
        workspace_bytes: Bytes allocated while it runs, beyond its results.
        state_bytes: Running statistics that it updates and that are saved. If the
            operator is in an inner segment, the one around copies them at its end.
    """

    name: str
    seconds: float
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    replayable: bool = True
    workspace_bytes: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Save:
    """One tensor that autograd saved in forward.

    Attributes:
        value: The value that it refers to.
        used: The first moment of backward that needs it.
        released: The last moment at which autograd holds it.
        finished: The last moment at which a replayed copy of it is in use, which
            autograd does not hold; `BEFORE`: when it is released. If one copy served
            several saves of a value when measured, it is the last of theirs: too late
            for a plan with these saves in several regions.
    """

    value: int
    used: int
    released: int
    finished: int = BEFORE

    @property
    def replayed_until(self) -> int:
        """The last moment at which a replayed copy of it is in use."""
        return self.released if self.finished == BEFORE else self.finished


class Dropped(NamedTuple):
    """A tensor that autograd saved and that backward of this pass does not use.

    It was dropped in forward, for example with the detached output of a call, or is for
    a later pass. The region around it replays nothing for it.

    Attributes:
        value: The value that it refers to.
        until: The last moment at which autograd holds it.
    """

    value: int
    until: int


THROUGH = sys.maxsize
"""The depth of no replay: the copy lives while the moment's operator runs."""


class Claim(NamedTuple):
    """A value that autograd, or a region for its replay, may need.

    Attributes:
        value: The value.
        used: The moment at which it is needed.
        gone: When a replayed copy of it is freed: a moment, and the depth of the
            replay before it that does so, or `THROUGH`.
        dies: The last moment at which the claim exists.
    """

    value: int
    used: int
    gone: tuple[int, int]
    dies: int


class StorageArrays(NamedTuple):
    """The storages of a graph, one array for each attribute.

    Attributes:
        bytes: Their sizes.
        born: The moments that allocated them; 0 if they existed before.
        dies: `Storage.dies`.
    """

    bytes: Integers
    born: Integers
    dies: Integers


@dataclass(frozen=True, slots=True)
class Boundary:
    """A place in forward where a region may begin or end.

    Attributes:
        operation: The number of operations before it.
        saves: The number of tensors that autograd saved before it.
        module: The path of the module that is entered or left there.
        call: The number of that module's call in the step, from 0.
        entering: Whether the module is entered; False: left.
        model_call: The number of the model's call in the step, from 0. Operations
            between two calls are in no region.
        unit: The path of the FSDP2 unit that the operations up to the next boundary
            belong to; None: they belong to several.
    """

    operation: int
    saves: int
    module: str = ""
    call: int = 0
    entering: bool = True
    model_call: int = 0
    unit: str | None = ""


class BlockCall(NamedTuple):
    """A call of a block, between two boundaries.

    Attributes:
        module: The path of the block.
        call: The number of its call in the step, from 0.
        start: The number of the boundary where it begins.
        stop: The number of the boundary where it ends.
    """

    module: str
    call: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class HostCosts:
    """The host's time for the operators of a step that an accelerator computes.

    The device computes while the host launches, so the slower of the two sets the time
    of the step.

    Attributes:
        plain_seconds: The host's time for a step without any region.
        recording_seconds: The time that a region adds to each operator in it.
        replaying_seconds: The time of each recomputed operator.
    """

    plain_seconds: float
    recording_seconds: float
    replaying_seconds: float

    def scaled(self, factor: float) -> "HostCosts":
        """Return the costs for a host that takes `factor` times as long."""
        return HostCosts(
            factor * self.plain_seconds,
            factor * self.recording_seconds,
            factor * self.replaying_seconds,
        )

    def seconds(self, recorded: int, replayed: int) -> float:
        """Return the host's time for a step, given its numbers of operators.

        Examples:
            >>> HostCosts(4.0, 0.5, 0.25).seconds(recorded=2, replayed=4)
            6.0
        """
        recording = recorded * self.recording_seconds
        return self.plain_seconds + recording + replayed * self.replaying_seconds


@dataclass(frozen=True, repr=False)
class Graph:
    """One training step, as measured.

    A step that calls the model again after a backward pass, in another pattern, has
    several passes: this is the one with the highest plain peak. Equal passes, such as
    those of gradient accumulation, count as one: the one with the highest peak.

    Attributes:
        operations: Forward, in order: moments 0 to n - 1.
        backward: The number of moments of backward: n to n + backward - 1.
        storages: The memory that is accounted for.
        values: The values.
        saves: The tensors that autograd saved, in order.
        boundaries: Where regions may begin and end, in order. The first is at the
            start of the model and the last at its end.
        other_bytes: For each moment, the bytes in use besides the storages: no plan
            can change them.
        own_bytes: For each moment, the part of `other_bytes` that its operator
            allocates: not yet in use during a replay before it. Empty: nothing.
        step_seconds: Forward and backward without any region, on the device.
        recording_seconds: The time that a region adds to each operator in it, where
            the device waits for that.
        host_costs: The host's time for the step; None: the host is the device.
        link_bytes_per_second: The speed of a copy to the host and back; 0: unknown.
        blocks: The numbers of the boundaries between which the model repeats itself or
            is best cut; increasing, including the first and the last boundary of the
            planned part.
        estimated_for: The device for which times were estimated without running the
            step; empty: they were measured.
        roots: The paths of the modules that the step itself calls in this pass, in
            order; empty for the model itself.
        dropped: Tensors that autograd saved and backward does not use, in order.
        gradients: The paths of the parameters that get a gradient, each with the first
            moment at which the gradient exists; `BEFORE`: it existed before the pass.
        calls: The calls of blocks, in order.
        repeatable: The paths of blocks that may be called again: a call was observed
            to have no side effects.
        others: The other passes of the step.
        order: The passes as the step runs them: 0 is this one, 1 the first of the
            others. Empty in the others.
    """

    operations: tuple[Operation, ...]
    backward: int
    storages: tuple[Storage, ...]
    values: tuple[Value, ...]
    saves: tuple[Save, ...]
    boundaries: tuple[Boundary, ...]
    other_bytes: tuple[int, ...]
    step_seconds: float = 0.0
    recording_seconds: float = 0.0
    link_bytes_per_second: float = 0.0
    blocks: tuple[int, ...] = field(default=())
    own_bytes: tuple[int, ...] = field(default=())
    estimated_for: str = ""
    host_costs: HostCosts | None = None
    roots: tuple[str, ...] = ("",)
    dropped: tuple[Dropped, ...] = field(default=())
    gradients: tuple[tuple[str, int], ...] = field(default=())
    calls: tuple[BlockCall, ...] = field(default=())
    repeatable: frozenset[str] = frozenset()
    others: tuple["Graph", ...] = field(default=())
    order: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if len(self.other_bytes) != self.moments:
            raise UsageError(
                f"expected other_bytes for {self.moments} moments, got "
                f"{len(self.other_bytes)}."
            )
        if self.own_bytes and len(self.own_bytes) != self.moments:
            raise UsageError(
                f"expected own_bytes for {self.moments} moments, or none, got "
                f"{len(self.own_bytes)}."
            )

    def __repr__(self) -> str:
        passes = f", {len(self.passes)} passes" if self.others else ""
        device = f" on {self.estimated_for}, estimated" if self.estimated_for else ""
        return (
            f"Graph({len(self.operations)} operators in {max(len(self.blocks) - 1, 1)} "
            f"blocks{passes}: plain peak {print_bytes(self.peak_bytes)}, saved for "
            f"backward {print_bytes(self.saved_bytes)}, step "
            f"{print_seconds(self.step_seconds)}{device})"
        )

    def _repr_html_(self) -> str:
        from recoup.core.simulation import simulate

        passes = (simulate(each, ()) for each in self.passes)
        return as_html(repr(self), [n for each in passes for n in each.bytes_at])

    @cached_property
    def peak_bytes(self) -> int:
        """The peak of the plain step over all passes.

        Examples:
            >>> Graph((), 1, (), (), (), (), (8,)).peak_bytes
            8
        """
        # An import cycle otherwise: the simulation imports this module.
        from recoup.core.simulation import simulate

        return max(simulate(each, ()).peak_bytes for each in self.passes)

    @property
    def moments(self) -> int:
        """The number of moments of the step."""
        return len(self.operations) + self.backward

    @property
    def passes(self) -> tuple["Graph", ...]:
        """This pass and the others."""
        return (self, *self.others)

    def map_passes(self, change: Callable[["Graph"], "Graph"]) -> "Graph":
        """Return the step with every pass changed."""
        changed = change(replace(self, others=()))
        return replace(changed, others=tuple(map(change, self.others)))

    @property
    def model_calls(self) -> int:
        """The number of calls of the model before backward."""
        return max((b.model_call for b in self.boundaries), default=0) + 1

    def operations_of_call(self, model_call: int) -> range:
        """Return the operations of one call of the model."""
        found = [b.operation for b in self.boundaries if b.model_call == model_call]
        return range(min(found, default=0), max(found, default=0))

    @cached_property
    def runs(self) -> tuple[int, ...]:
        """The run of each interval between neighbouring boundaries, by number.

        A region stays within one run: a call of the model, or a part of it in one unit
        of FSDP2, whose parameters are gathered together. -1: no region may be there.
        """
        found: list[int] = []
        before: tuple[int, str] | None = None
        number = -1
        for here, after in pairwise(self.boundaries):
            is_between = here.model_call != after.model_call or here.unit is None
            key = None if is_between else (here.model_call, here.unit or "")
            number += key != before
            before = key
            found.append(-1 if key is None else number)
        return tuple(found)

    def is_within_run(self, start: int, stop: int) -> bool:
        """Return whether a region may begin and end at these boundaries."""
        if start >= stop:
            return True
        return -1 < self.runs[start] == self.runs[stop - 1]

    @property
    def forward_seconds(self) -> float:
        """The time to recompute all of forward's operators."""
        return sum(operation.seconds for operation in self.operations)

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes of the storages that autograd saves, each once."""
        saved = {self.values[save.value].storage for save in self.saves}
        return sum(self.storages[storage].bytes for storage in saved)

    @cached_property
    def claims(self) -> tuple[Claim, ...]:
        """One claim for each tensor that autograd saved."""
        return tuple(
            Claim(save.value, save.used, (save.replayed_until, THROUGH), save.released)
            for save in self.saves
        )

    @cached_property
    def known_claims(self) -> dict[object, Any]:
        """A cache of `recoup.core.footprint`: planners need few intervals."""
        return {}

    @cached_property
    def remade_by(self) -> tuple[int, ...]:
        """The operation that can make each value again; `BEFORE`: none can."""
        return tuple(
            value.producer
            if value.producer >= 0 and self.operations[value.producer].replayable
            else BEFORE
            for value in self.values
        )

    @cached_property
    def arrays(self) -> StorageArrays:
        """The storages, as arrays."""
        found = [(s.bytes, max(s.born, 0), s.dies) for s in self.storages]
        columns = np.array(found, dtype=np.int64).reshape(-1, 3).T
        return StorageArrays(*np.ascontiguousarray(columns))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each storage."""
        return tuple(storage.bytes for storage in self.storages)

    @cached_property
    def storage_of(self) -> tuple[int, ...]:
        """The storage of each value."""
        return tuple(value.storage for value in self.values)

    @cached_property
    def versions(self) -> tuple[list[int], list[int], list[int]]:
        """The values in the order of production, their producers and their storages.

        Of the values that an operation makes of one storage, the first is the last.
        """
        every = [(v.producer, -n, v.storage) for n, v in enumerate(self.values)]
        every.sort()
        return [-n for _, n, _ in every], [p for p, *_ in every], [s for *_, s in every]

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The number of operations before each boundary."""
        return tuple(boundary.operation for boundary in self.boundaries)

    @cached_property
    def mentioned(self) -> tuple[tuple[int, ...], ...]:
        """The storages that each operation of forward reads and makes."""
        return tuple(
            tuple(self.storage_of[value] for value in (*each.reads, *each.makes))
            for each in self.operations
        )

    def dying_inputs(self, inside: range) -> tuple[int, ...]:
        """Return storages from outside that die in an interval of operations.

        Replayable operators in it read them, and none of those made them.
        """
        found = self._dying_inputs.get(inside)
        if found is None:
            found = self._dying_inputs[inside] = tuple(
                storage
                for moment in inside[:-1]
                for storage in self._dying.get(moment, ())
                if any(
                    reader in inside
                    and not (
                        producer in inside and self.operations[producer].replayable
                    )
                    for reader, producer in self._readers[storage]
                )
            )
        return found

    @cached_property
    def _dying_inputs(self) -> dict[range, tuple[int, ...]]:
        """The results of `dying_inputs` so far: planners need few intervals."""
        return {}

    @cached_property
    def _readers(self) -> dict[int, list[tuple[int, int]]]:
        """The replayable readers of each storage in forward, with its producers."""
        found: dict[int, list[tuple[int, int]]] = {}
        for number, operation in enumerate(self.operations):
            for value in operation.reads if operation.replayable else ():
                read = self.values[value]
                found.setdefault(read.storage, []).append((number, read.producer))
        return found

    @cached_property
    def _dying(self) -> dict[int, list[int]]:
        """The storages that are read, by the moment of forward they die at."""
        found: dict[int, list[int]] = {}
        for storage in self._readers:
            if self.storages[storage].bytes:
                found.setdefault(self.storages[storage].dies, []).append(storage)
        return found

    def bytes_of(self, value: int) -> int:
        """Return the bytes of a value's storage."""
        return self.sizes[self.storage_of[value]]

    def saves_between(self, start: int, stop: int) -> Sequence[Save]:
        """Return the tensors that autograd saves between two boundaries."""
        first, last = self.boundaries[start], self.boundaries[stop]
        return self.saves[first.saves : last.saves]

    def operations_between(self, start: int, stop: int) -> range:
        """Return the operations between two boundaries."""
        return range(self.places[start], self.places[stop])


def module_paths(graph: Graph) -> list[str]:
    """Return the path of the innermost known module around each operation of forward.

    A graph has one boundary per place. Operations before a module is left belong to it,
    and operations before a module is entered to the module around it. Where a module
    and the one around it end at one place, the boundary names the latter.

    Examples:
        >>> from recoup.core.graph import Operation
        >>> operations = tuple(Operation("aten.mm", 1.0, (), ()) for _ in range(3))
        >>> places = (
        ...     Boundary(0, 0, "h.0"),
        ...     Boundary(1, 0, "h.0.up", entering=False),
        ...     Boundary(2, 0, "h.0.down"),
        ...     Boundary(3, 0, "h.0", entering=False),
        ... )
        >>> module_paths(Graph(operations, 0, (), (), (), places, (0,) * 3))
        ['h.0.up', 'h.0', 'h.0']
    """
    paths = [""] * len(graph.operations)
    for begin, end in pairwise(graph.boundaries):
        if begin.operation < end.operation:
            path = _between(begin, end)
            for operation in range(begin.operation, end.operation):
                paths[operation] = path
    return paths


def next_needed(graph: Graph) -> list[int | None]:
    """Return for each moment the producer of the value that backward needs next.

    Examples:
        >>> from recoup.core.graph import Operation, Save, Storage, Value
        >>> graph = Graph(
        ...     operations=(Operation("exp", 1.0, (), (0,)),),
        ...     backward=2,
        ...     storages=(Storage(8, 0, 0),),
        ...     values=(Value(0, 0),),
        ...     saves=(Save(0, 1, 1),),
        ...     boundaries=(),
        ...     other_bytes=(0,) * 3,
        ... )
        >>> next_needed(graph)
        [0, 0, None]
    """
    producers = [(save.used, graph.values[save.value].producer) for save in graph.saves]
    saves = sorted(pair for pair in producers if pair[1] >= 0)
    found: list[int | None] = []
    position = 0
    for moment in range(graph.moments):
        while position < len(saves) and saves[position][0] < moment:
            position += 1
        found.append(saves[position][1] if position < len(saves) else None)
    return found


def _between(begin: Boundary, end: Boundary) -> str:
    if not end.entering:
        return end.module
    around = f"{begin.module}." if begin.module else ""
    if begin.entering and end.module.startswith(around):
        return begin.module
    pairs = zip(begin.module.split("."), end.module.split("."), strict=False)
    return ".".join(
        name for name, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)
    )

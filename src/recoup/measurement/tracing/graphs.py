"""Build the graph of a step from the traces of its passes."""

import bisect
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from recoup.core.graph import (
    BlockCall,
    Boundary,
    Dropped,
    Graph,
    Operation,
    Save,
    Storage,
    Value,
)
from recoup.core.segments import Segment
from recoup.core.simulation import simulate
from recoup.measurement.timing.host_cost import scaled
from recoup.measurement.tracing.trace import (
    Trace,
    TracedOperation,
    TracedSave,
    TracedStorage,
)
from recoup.planners.baselines import recompute_all


def block_boundaries(
    boundaries: Sequence[Boundary], names: Collection[str]
) -> tuple[int, ...]:
    """Return the numbers of the boundaries at which named modules begin and end.

    Includes the first and last boundary of each model call.
    """
    found = {0, len(boundaries) - 1} if boundaries else set[int]()
    for number, boundary in enumerate(boundaries):
        if boundary.module in names:
            found.add(number)
        if number and boundary.model_call != boundaries[number - 1].model_call:
            found |= {number - 1, number}
    return tuple(sorted(found))


_SLACK = 64
"""A storage that a region held in the traced step and that died at most this many
moments after the region could free it had no other owner."""


_NEAR = 16
"""An operator that overwrites a value made at most this many operators earlier counts
as an in-place activation."""


def graph_of(
    trace: Trace,
    seconds_of: Callable[[int], float],
    *,
    blocks: Collection[str],
    units: Collection[str] = (),
) -> Graph:
    """Return the graph of a traced step.

    Args:
        trace: The trace.
        seconds_of: Function from a timing's number to the operator's seconds.
        blocks: The paths of the modules at which the traced step was cut into segments
            that recompute everything.
        units: The paths of the modules that FSDP2 gathers one at a time.
    """
    forward = len(trace.operations)
    moments = trace.moment
    boundaries, calls = boundaries_of(trace, blocks)
    boundaries = within_units(trace, boundaries, units)
    measured = [operation.peak_bytes for operation in trace.operations]
    measured.extend(trace.backward_bytes)
    own = [operation.own_bytes for operation in trace.operations]
    own.extend(trace.backward_own_bytes)
    graph = Graph(
        operations=tuple(_operation(op, seconds_of) for op in trace.operations),
        backward=len(trace.backward_bytes),
        storages=tuple(_storage(s, moments - 1) for s in trace.storages),
        values=tuple(
            Value(v.storage, v.producer, holdable=not v.overwritten)
            for v in trace.values
        ),
        saves=tuple(_saves(trace, forward, moments)),
        dropped=tuple(
            Dropped(save.value, _released(save, moments - 1))
            for save in trace.saves
            if _is_dropped(save, forward)
        ),
        boundaries=boundaries,
        other_bytes=tuple(measured),
        blocks=block_boundaries(boundaries, blocks),
        own_bytes=tuple(own),
        gradients=tuple(trace.gradients.items()),
        calls=calls,
    )
    traced = recompute_all(graph)
    graph = replace(graph, storages=_natural(graph, trace, traced))
    modelled = simulate(replace(graph, other_bytes=(0,) * moments), traced)
    # Clamped: where the model overestimates, it must not reduce the measured bytes.
    other = [
        max(0, seen_bytes - model_bytes)
        for seen_bytes, model_bytes in zip(measured, modelled.settled_at, strict=True)
    ]
    return replace(graph, other_bytes=tuple(other))


def boundaries_of(
    trace: Trace, blocks: Collection[str]
) -> tuple[tuple[Boundary, ...], tuple[BlockCall, ...]]:
    """Return the boundaries where modules are entered or left, and the block calls.

    Of several boundaries between the same operators, keeps a block's, else the
    outermost. Omits places where a region would have to copy a value that is soon
    overwritten, except the first and the last of each model call.
    """
    torn = torn_places(trace)
    used = [
        0,
        *accumulate(not _is_dropped(s, len(trace.operations)) for s in trace.saves),
    ]
    firsts = {b.model_call: b for b in reversed(trace.boundaries)}
    lasts = {b.model_call: b for b in trace.boundaries}

    def rank(boundary: Boundary) -> tuple[bool, int]:
        return boundary.module not in blocks, boundary.module.count(".")

    found: dict[tuple[int, int, int], Boundary] = {}
    entered: dict[tuple[str, int], tuple[int, int, int]] = {}
    ended: dict[tuple[str, int], tuple[int, int, int]] = {}
    for traced in trace.boundaries:
        call = traced.model_call
        is_end = traced is firsts[call] or traced is lasts[call]
        if traced.operation in torn and not is_end:
            continue
        saves = used[traced.saves]
        place = (traced.operation, saves, call)
        boundary = replace(traced, saves=saves)
        known = found.get(place)
        if known is None or rank(boundary) < rank(known):
            found[place] = boundary
        if traced.module in blocks:
            (entered if traced.entering else ended)[traced.module, traced.call] = place
    numbers = {place: number for number, place in enumerate(found)}
    calls = [
        BlockCall(*block, numbers[place], numbers[ended[block]])
        for block, place in entered.items()
        if block in ended
    ]
    return tuple(found.values()), tuple(c for c in calls if c.start < c.stop)


def within_units(
    trace: Trace, boundaries: Sequence[Boundary], units: Collection[str]
) -> tuple[Boundary, ...]:
    """Return boundaries that name the unit of the operations after each."""
    if not units:
        return tuple(boundaries)
    of_operation: list[str] = []
    open_modules = [""]
    for here, after in pairwise([*trace.boundaries, None]):
        assert here is not None, "only the last one is"
        if here.entering:
            open_modules.append(here.module)
        elif len(open_modules) > 1:
            open_modules.pop()
        stop = len(trace.operations) if after is None else after.operation
        unit = _unit_around(open_modules[-1], units)
        of_operation += [unit] * (stop - len(of_operation))
    found: list[Boundary] = []
    unit: str | None = ""
    for here, after in pairwise([*boundaries, None]):
        assert here is not None, "only the last one is"
        stop = len(trace.operations) if after is None else after.operation
        inside = set(of_operation[here.operation : stop])
        if inside:  # else as before
            unit = inside.pop() if len(inside) == 1 else None
        found.append(replace(here, unit=unit))
    return tuple(found)


def _unit_around(path: str, units: Collection[str]) -> str:
    """Return the path of the innermost unit around a module; empty: the model's."""
    while path and path not in units:
        path = path.rpartition(".")[0]
    return path


def torn_places(trace: Trace) -> set[int]:
    """Return the places between a value's producer and an operator that overwrites it.

    Each place is given by the number of the operation after it. A region that begins
    there needs the value before the write, and copies it. In-place activations follow
    within a few operators; a value overwritten much later is a buffer that the model
    fills, which is no reason not to cut.
    """
    torn: set[int] = set()
    last: dict[int, int] = {}
    for number, operation in enumerate(trace.operations):
        for value in operation.makes:
            storage = trace.values[value].storage
            before = last.get(storage, number)
            if number - before <= _NEAR:
                torn.update(range(before + 1, number + 1))
            last[storage] = number
    return torn


def torn_blocks(trace: Trace, blocks: Collection[str]) -> set[str]:
    """Return the blocks that begin or end where a value is soon overwritten."""
    torn = torn_places(trace)
    return {
        boundary.module
        for boundary in trace.boundaries
        if boundary.module in blocks and boundary.operation in torn
    }


def _operation(
    traced: TracedOperation, seconds_of: Callable[[int], float]
) -> Operation:
    return Operation(
        name=traced.name,
        seconds=seconds_of(traced.timing),
        reads=tuple(traced.reads),
        makes=tuple(traced.makes),
        replayable=traced.asked == len(traced.makes) and traced.asked > 0,
        workspace_bytes=traced.workspace_bytes,
        state_bytes=traced.state_bytes,
    )


def _storage(traced: TracedStorage, last: int) -> Storage:
    return Storage(
        traced.bytes, traced.born, last if traced.dies is None else traced.dies
    )


def _saves(trace: Trace, forward: int, moments: int) -> list[Save]:
    """Return the saved tensors with their live ranges in backward.

    One that is never unpacked lives to the end. A region may hold one longer than
    autograd needs it; that need is assumed to end when the next saved tensor is
    unpacked.
    """
    asked = sorted({save.used for save in trace.saves if save.used is not None})
    found: list[Save] = []
    for save in trace.saves:
        if _is_dropped(save, forward):
            continue
        used = moments - 1 if save.used is None else save.used
        released = used if save.released is None else save.released
        if save.by_region:
            later = bisect.bisect_right(asked, used)
            if later < len(asked):
                released = min(released, asked[later] - 1)
        used = min(max(used, forward), moments - 1)
        released = min(max(released, used), moments - 1)
        finished = released if save.finished is None else max(save.finished, used)
        found.append(Save(save.value, used, released, min(finished, moments - 1)))
    return found


def _is_dropped(save: TracedSave, forward: int) -> bool:
    """Return whether backward of this pass never unpacks a saved tensor."""
    if save.used is not None:
        return False
    return save.is_later or (save.released is not None and save.released < forward)


def _released(save: TracedSave, last: int) -> int:
    """Return the last moment at which autograd holds a saved tensor in this pass."""
    if save.is_later or save.released is None:
        return last
    return min(save.released, last)


def _held_for_dropped(graph: Graph, segments: Sequence[Segment]) -> dict[int, int]:
    """Return until when regions hold storages for replays that are never needed."""
    found: dict[int, int] = {}
    for segment in segments if graph.dropped else ():
        inside = graph.operations_between(segment.start, segment.stop)
        until = [
            dropped.until
            for dropped in graph.dropped
            if graph.values[dropped.value].producer in inside
        ]
        for number in inside if until else ():
            for value in graph.operations[number].reads:
                found[graph.values[value].storage] = max(until)
    return found


def _natural(
    graph: Graph, trace: Trace, segments: Sequence[Segment]
) -> tuple[Storage, ...]:
    """Return the storages with their live ranges if no region held them.

    In the traced step regions held some into backward. These are assumed to die at
    forward's last read, or with the last tensor that modules passed on, if later.
    """
    last_read: dict[int, int] = {}
    held_until: dict[int, int] = {}
    for number, operation in enumerate(graph.operations):
        for value in (*operation.reads, *operation.makes):
            last_read[graph.values[value].storage] = number
    for save in graph.saves:
        storage = graph.values[save.value].storage
        held_until[storage] = max(held_until.get(storage, 0), save.released)
    for segment in segments:
        saves = graph.saves_between(segment.start, segment.stop)
        end = max((save.released for save in saves), default=0)
        inside = graph.operations_between(segment.start, segment.stop)
        for number in inside:
            for value in graph.operations[number].reads:
                storage = graph.values[value].storage
                held_until[storage] = max(held_until.get(storage, 0), end)
    dropped_until = _held_for_dropped(graph, segments)
    forward = len(graph.operations)
    found: list[Storage] = []
    for number, storage in enumerate(graph.storages):
        held = held_until.get(number, -1)
        by_regions = storage.dies == dropped_until.get(number) or (
            trace.storages[number].dies is not None
            and forward <= storage.dies <= held + _SLACK
        )
        traced = trace.storages[number]
        if by_regions and number in last_read and not traced.names:
            dies = max(last_read[number], traced.unnamed or 0)
            found.append(replace(storage, dies=min(dies, storage.dies)))
        else:
            found.append(storage)
    return tuple(found)


def step_graph(
    traces: Sequence[Trace],
    seconds_of: Callable[[int], float],
    *,
    blocks: Collection[str],
    units: Collection[str] = (),
    recording_seconds: float = 0.0,
) -> Graph:
    """Return the graph of a step, with the times of its operators."""
    kinds: dict[object, list[int]] = {}
    graphs: list[Graph] = []
    for number, trace in enumerate(traces):
        graph = graph_of(trace, seconds_of, blocks=blocks, units=units)
        backward_seconds = sum(map(seconds_of, trace.backward_timings))
        graphs.append(
            replace(
                graph,
                step_seconds=graph.forward_seconds + backward_seconds,
                recording_seconds=recording_seconds,
                roots=tuple(trace.roots),
            )
        )
        kinds.setdefault(_kind(graph), []).append(number)
    found: list[tuple[int, Graph, list[int]]] = []
    for numbers in kinds.values():
        largest = max((graphs[n] for n in numbers), key=_plain_bytes)
        seconds = sum(graphs[n].step_seconds for n in numbers)
        # A plan is applied to each of them, so its recomputation repeats as well.
        whole = replace(scaled(largest, len(numbers)), step_seconds=seconds)
        found.append((_plain_bytes(largest), whole, numbers))
    found.sort(key=lambda item: -item[0])
    places = {n: place for place, (_, _, numbers) in enumerate(found) for n in numbers}
    main, *others = (graph for _, graph, _ in found)
    order = tuple(places[n] for n in range(len(traces))) if others else (0,)
    return replace(
        main, order=order, others=tuple(replace(other, order=()) for other in others)
    )


def _plain_bytes(graph: Graph) -> int:
    return simulate(graph, ()).peak_bytes


def _kind(graph: Graph) -> object:
    """Return a key that is equal for passes that can share a plan."""
    return (
        tuple(
            (operation.name, tuple(map(graph.bytes_of, operation.makes)))
            for operation in graph.operations
        ),
        graph.boundaries,
        len(graph.saves),
    )

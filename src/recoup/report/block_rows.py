"""What a plan does in each block: bytes kept, sent away and computed again."""

from collections.abc import Sequence

from recoup.core.graph import Graph
from recoup.core.segments import Segment
from recoup.report.findings import BlockRow
from recoup.report.stretches import stretch_of, stretches
from recoup.report.timeline import total_footprint


def block_rows(graph: Graph, segments: Sequence[Segment]) -> tuple[BlockRow, ...]:
    """Return a row for each block, in the order of forward.

    In every row what is kept, sent away and computed again adds up to what plain
    autograd saves there.

    Costs time in proportion to the operators and saved tensors.

    Examples:
        >>> block_rows(Graph((), 0, (), (), (), (), ()), ())
        ()
    """
    parts = stretches(graph)
    total = total_footprint(graph, segments)
    half = len(graph.operations)
    sent = {offload.storage for offload in total.offloads}
    saved = [0] * len(parts)
    kept = [0] * len(parts)
    offloaded = [0] * len(parts)
    for number in sorted({graph.values[save.value].storage for save in graph.saves}):
        storage = graph.storages[number]
        if storage.born < 0 or storage.born >= half:
            continue
        part = stretch_of(parts, storage.born)
        saved[part] += storage.bytes
        if max(total.holds.get(number, -1), storage.dies) >= half:
            kept[part] += storage.bytes
        elif number in sent:
            offloaded[part] += storage.bytes
    seconds = [0.0] * len(parts)
    for replay in total.replays:
        for operation in replay.operations:
            seconds[stretch_of(parts, operation)] += graph.operations[operation].seconds
    return tuple(
        BlockRow(
            name=part.name,
            operators=part.stop - part.first,
            saved_bytes=saved[n],
            kept_bytes=kept[n],
            offloaded_bytes=offloaded[n],
            recomputed_bytes=saved[n] - kept[n] - offloaded[n],
            replay_seconds=seconds[n],
        )
        for n, part in enumerate(parts)
    )

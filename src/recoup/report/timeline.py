"""The memory of a step as stacked bands: what is in use, moment by moment, and why."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from recoup.core.footprint import Footprint, spikes_of, total_footprint
from recoup.core.graph import Graph
from recoup.core.segments import Segment
from recoup.report.findings import Layer, Timeline
from recoup.report.stretches import Stretch, stretch_of, stretches

COLUMNS = 240
"""How many columns a timeline has at most: more than that no screen shows."""

BANDS = 12
"""How many bands the blocks share at most; neighbours are put together."""

RUNNING = "values on their way through forward"
REMADE = "values computed again"
ON_THE_WAY = "on the way in a replay"
REST = "gradients, optimizer state, batch and workspace"
RESERVED = "room for the optimizer's state"


def timeline(
    graph: Graph,
    segments: Sequence[Segment],
    *,
    resident: Sequence[tuple[str, int]] = (),
    reserved_bytes: int = 0,
) -> Timeline:
    """Return the memory of a step whose forward runs in these segments.

    In every column the bands add up to what `simulate` predicts for its moment, and
    the reserved bytes.

    Costs time in proportion to the operators and saved tensors, and to the moments for
    each band.

    Args:
        graph: The step.
        segments: The plan.
        resident: Names and bytes of what is in memory all the time, as parameters.
        reserved_bytes: What is kept free.

    Examples:
        >>> empty = timeline(Graph((), 0, (), (), (), (), ()), ())
        >>> empty.peak_bytes, empty.layers
        (0, ())
    """
    parts = stretches(graph)
    total = total_footprint(graph, segments)
    bands = _Bands(graph, parts)
    bands.fixed(resident, reserved_bytes)
    bands.forward(total)
    bands.replays(total)
    full = bands.layers()
    sums = [sum(column) for column in zip(*(b.bytes_at for b in full), strict=True)]
    peak_bytes = max(sums, default=0)
    moment = sums.index(peak_bytes) if sums else 0
    alive = [(layer.name, layer.bytes_at[moment]) for layer in full]
    columns = _columns(sums)
    return Timeline(
        layers=tuple(
            replace(layer, bytes_at=tuple(layer.bytes_at[m] for m in columns))
            for layer in _merged(full)
        ),
        moments=tuple(columns),
        total_moments=graph.moments,
        forward_moments=len(graph.operations),
        peak_bytes=peak_bytes,
        peak_moment=moment,
        peak_place=_place(graph, parts, total, moment) if sums else "nowhere",
        alive=tuple(sorted((a for a in alive if a[1]), key=lambda a: -a[1])),
    )


@dataclass
class _Band:
    """A band while it is filled: what begins and ends at each moment."""

    name: str
    category: str
    changes: list[int] = field(repr=False)

    def add(self, nbytes: int, first: int, last: int) -> None:
        stop = min(last, len(self.changes) - 2) + 1
        if first < stop:
            self.changes[first] += nbytes
            self.changes[stop] -= nbytes

    def layer(self) -> Layer:
        total, sums = 0, list[int]()
        for change in self.changes[:-1]:
            total += change
            sums.append(total)
        return Layer(self.name, self.category, tuple(sums))


class _Bands:
    """Sorts every byte of a step into a band."""

    def __init__(self, graph: Graph, parts: Sequence[Stretch]) -> None:
        self._graph = graph
        self._parts = parts
        self._fixed: list[Layer] = []
        self._held = [self._band(_held_words(part.name), "held") for part in parts]
        self._held.append(self._band("held from before the step", "held"))
        self._running = self._band(RUNNING, "running")
        self._remade = self._band(REMADE, "replay")
        self._spikes = self._band(ON_THE_WAY, "replay")

    def layers(self) -> list[Layer]:
        """Return the bands that hold anything, from the lowest to the highest."""
        bands = (*self._held, self._running, self._remade, self._spikes)
        found = [*self._fixed, *(band.layer() for band in bands)]
        return [layer for layer in _settled(found) if any(layer.bytes_at)]

    def fixed(self, resident: Sequence[tuple[str, int]], reserved_bytes: int) -> None:
        """Take what no plan can change."""
        count = self._graph.moments
        resident_bytes = sum(nbytes for _, nbytes in resident)
        for name, nbytes in resident:
            self._fixed.append(Layer(name, "fixed", (nbytes,) * count))
        # It may be below nothing: what was freed early is settled at the end.
        rest = tuple(other - resident_bytes for other in self._graph.other_bytes)
        self._fixed.append(Layer(REST, "fixed", rest))
        self._fixed.append(Layer(RESERVED, "fixed", (reserved_bytes,) * count))

    def forward(self, total: Footprint) -> None:
        """Take what forward made: on its way, held for backward, or sent away."""
        half = len(self._graph.operations)
        sent: dict[int, tuple[int, int, int]] = {}
        for offload in total.offloads:
            leaves, used, released = sent.get(offload.storage, (0, 1 << 60, 0))
            sent[offload.storage] = (
                max(leaves, offload.leaves),
                min(used, offload.used),
                max(released, offload.released),
            )
        for number, storage in enumerate(self._graph.storages):
            if not storage.bytes:
                continue
            held_until = total.holds.get(number, -1)
            until = max(storage.dies, held_until)
            born = max(storage.born, 0)
            if number in sent and until < half:
                leaves, used, released = sent[number]
                until = max(until, min(leaves, half) - 1)
                band = self._held_band(storage.born)
                band.add(storage.bytes, max(used - 1, half), released)
            is_held = held_until >= half
            band = self._held_band(storage.born) if is_held else self._running
            band.add(storage.bytes, born, until)

    def replays(self, total: Footprint) -> None:
        """Take what replays make, and what they need only on the way."""
        for nbytes, first, last in total.remade:
            self._remade.add(nbytes, first, last)
        for moment, nbytes in spikes_of(total).items():
            self._spikes.add(nbytes, moment, moment)

    def _band(self, name: str, category: str) -> _Band:
        return _Band(name, category, [0] * (self._graph.moments + 1))

    def _held_band(self, born: int) -> _Band:
        return self._held[stretch_of(self._parts, born) if born >= 0 else -1]


def _settled(layers: Sequence[Layer]) -> list[Layer]:
    """Return the bands without bytes below nothing; their sums stay.

    Where fewer bytes were measured than the storages account for, some of these were
    freed before: what is missing is taken from the highest bands.
    """
    columns = [list(layer.bytes_at) for layer in layers]
    for moment, amounts in enumerate(zip(*columns, strict=True)):
        debt = -sum(amount for amount in amounts if amount < 0)
        if not debt:
            continue
        for column in reversed(columns):
            if column[moment] < 0:
                column[moment] = 0
            else:
                paid = min(debt, column[moment])
                column[moment] -= paid
                debt -= paid
    return [
        replace(layer, bytes_at=tuple(column))
        for layer, column in zip(layers, columns, strict=True)
    ]


def _columns(sums: Sequence[int]) -> list[int]:
    """Return the moments to show: the highest of each group of neighbours."""
    count = min(COLUMNS, len(sums))
    edges = [len(sums) * i // count for i in range(count + 1)] if count else [0]
    return [
        max(range(start, stop), key=lambda m: sums[m])
        for start, stop in pairwise(edges)
    ]


def _held_words(name: str) -> str:
    """Return what is said of bytes that a stretch made; `before h.0` is no maker."""
    between = name.startswith(("before ", "after "))
    return f"held {'from' if between else 'by'} {name}"


def _merged(layers: Sequence[Layer]) -> list[Layer]:
    """Put neighbouring bands of blocks together until there are few enough."""
    held = [layer for layer in layers if layer.category == "held"]
    size = -(-len(held) // BANDS) if held else 1
    groups = [held[i : i + size] for i in range(0, len(held), size)]
    merged = [_together(group) for group in groups]
    before = [layer for layer in layers if layer.category == "fixed"]
    after = [layer for layer in layers if layer.category in ("running", "replay")]
    return [*before, *merged, *after]


def _together(group: Sequence[Layer]) -> Layer:
    if len(group) == 1:
        return group[0]
    last = group[-1].name.removeprefix("held by ").removeprefix("held from ")
    sums = tuple(map(sum, zip(*(layer.bytes_at for layer in group), strict=True)))
    return Layer(f"{group[0].name} to {last}", "held", sums)


def _place(
    graph: Graph, parts: Sequence[Stretch], total: Footprint, moment: int
) -> str:
    if moment < len(graph.operations):
        name = parts[stretch_of(parts, moment)].name
        return f"in forward, in {name}, at {graph.operations[moment].name}"
    replayed = [r for r in total.replays if r.moment == moment and r.operations]
    if replayed:
        name = parts[stretch_of(parts, replayed[0].operations[0])].name
        return f"in backward, when {name} has been computed again"
    needed = [
        (save.used, graph.values[save.value].producer)
        for save in graph.saves
        if save.used >= moment and graph.values[save.value].producer >= 0
    ]
    if not needed:
        return "at the end of backward"
    name = parts[stretch_of(parts, min(needed)[1])].name
    return f"in backward, about to use what {name} made"

"""The memory of a step over time: the bytes at each moment, by purpose."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from recoup.report.findings import CATEGORIES, Part, PlanView, Step

COLUMNS = 240
"""The maximum number of columns of a drawn timeline."""

BANDS = 12
"""The maximum number of bands for the blocks; neighbours are merged."""

REST = "gradients, optimizer state, batch and workspace"
RESERVED = "room for the optimizer's state"
NAMES = {
    "running": "temporaries of forward",
    "recomputed": "recomputed values",
    "workspace": "temporaries of backward",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """One band of a stacked timeline.

    Attributes:
        name: The purpose of the bytes.
        category: One of `CATEGORIES`.
        bytes_at: The bytes in each column of the timeline.
    """

    name: str
    category: str
    bytes_at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The memory of one step with a plan, ready to be drawn.

    Attributes:
        layers: The bands, from the lowest to the highest.
        moments: The moment that each column shows: among several that share a column,
            the one with most bytes.
        phases: Forward and backward of each pass: a name and the first column.
        peak_bytes: The most bytes at any moment.
        peak_moment: The first moment of the peak.
        peak_place: The position of the peak in the step, in words.
        alive: The parts of the peak, largest first: a name and bytes.
    """

    layers: tuple[Layer, ...] = field(repr=False)
    moments: tuple[int, ...] = field(repr=False)
    phases: tuple[tuple[str, int], ...]
    peak_bytes: int
    peak_moment: int
    peak_place: str
    alive: tuple[tuple[str, int], ...]


def timeline(step: Step, view: PlanView) -> Timeline:
    """Return the memory of a step with a plan as stacked bands.

    In every column the bands add up to the prediction of `simulate` for its moment,
    plus the reserved bytes. Costs time in proportion to the moments for each band.

    Examples:
        >>> view = PlanView("plain", 0, 0.0, 0, 0, "nowhere", (), (), ())
        >>> timeline(Step(), view).layers
        ()
    """
    full = [layer for layer in _settled(_layers(step, view)) if any(layer.bytes_at)]
    sums = [sum(column) for column in zip(*(b.bytes_at for b in full), strict=True)]
    alive = [(layer.name, layer.bytes_at[view.peak_moment]) for layer in full]
    columns = _columns(sums)
    return Timeline(
        layers=tuple(
            Layer(b.name, b.category, tuple(b.bytes_at[m] for m in columns))
            for b in _merged(full)
        ),
        moments=tuple(columns),
        phases=tuple(
            (name, sum(moment < first for moment in columns))
            for name, first in step.phases
        ),
        peak_bytes=view.peak_bytes,
        peak_moment=view.peak_moment,
        peak_place=view.peak_place,
        alive=tuple(sorted((a for a in alive if a[1]), key=lambda a: -a[1])),
    )


def _layers(step: Step, view: PlanView) -> list[Layer]:
    """Return all bands; amounts may be negative where bytes were freed early."""
    count = len(step.moments)
    resident_bytes = sum(nbytes for _, nbytes in step.resident)
    rest = tuple(m.other_bytes - resident_bytes for m in step.moments)
    fixed = [Layer(name, "fixed", (n,) * count) for name, n in step.resident]
    fixed.append(Layer(REST, "fixed", rest))
    fixed.append(Layer(RESERVED, "fixed", (step.reserved_bytes,) * count))
    blocks = dict.fromkeys(part.block for part in step.parts)
    names = [*map(_held_words, blocks), "saved before the step", *NAMES.values()]
    changes = {name: [0] * (count + 1) for name in names}
    for each in view.allocations:
        category = CATEGORIES[each.category]
        name = NAMES.get(category) or _held_name(step.parts, each.part)
        changes[name][each.first] += each.bytes
        changes[name][each.last + 1] -= each.bytes
    categories = {name: category for category, name in NAMES.items()}
    return [
        *fixed,
        *(
            Layer(name, categories.get(name, "held"), tuple(accumulate(found[:-1])))
            for name, found in changes.items()
        ),
    ]


def _held_name(parts: Sequence[Part], part: int) -> str:
    return "saved before the step" if part < 0 else _held_words(parts[part].block)


def _held_words(name: str) -> str:
    """Return the label of bytes that a block made; `before h.0` made none."""
    between = name.startswith(("before ", "after "))
    return f"saved {'from' if between else 'by'} {name}"


def _settled(layers: Sequence[Layer]) -> list[Layer]:
    """Return the bands without negative amounts; their sums stay the same.

    Where fewer bytes were measured than the tensors account for, some tensors were
    freed earlier: the difference is subtracted from the highest bands.
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
        Layer(layer.name, layer.category, tuple(column))
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


def _merged(layers: Sequence[Layer]) -> list[Layer]:
    """Merge neighbouring bands of blocks until there are few enough."""
    held = [layer for layer in layers if layer.category == "held"]
    size = -(-len(held) // BANDS) if held else 1
    groups = [held[i : i + size] for i in range(0, len(held), size)]
    merged = [_together(group) for group in groups]
    before = [layer for layer in layers if layer.category == "fixed"]
    after = [layer for layer in layers if layer.category in NAMES]
    return [*before, *merged, *after]


def _together(group: Sequence[Layer]) -> Layer:
    if len(group) == 1:
        return group[0]
    last = group[-1].name.removeprefix("saved by ").removeprefix("saved from ")
    sums = tuple(map(sum, zip(*(layer.bytes_at for layer in group), strict=True)))
    return Layer(f"{group[0].name} to {last}", "held", sums)

"""Growth: how the storages of a step grow with the dimensions of its batch.

A size is the length of each axis of each input tensor. Axes that change by the same
factor in every call are one dimension: the batch, the length of a sequence, the side of
an image. A storage grows with a power of each dimension, and the powers are learned
from the observed sizes. While several powers explain the observations, the largest
result is predicted.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from recoup.core.graph import Graph, Operation

Axis = tuple[str, int]
"""The path of an input tensor, and one of its axes; -1: the bytes of an element."""

Size = Mapping[Axis, int]
"""The length of each axis."""

_STEPS = 8
"""The number of size groups up to the measured size, and from each size to its
double."""

_ROUNDING = 1e-9

_MOST_DIMENSIONS = 3
"""If more dimensions change, they are merged into one: the number of elements."""

_TOLERANCE = 0.1
"""The relative error up to which a power explains a storage: an added token, or the
edge of a convolution, does not make another power."""

_NEAR = 8
"""Temporaries of backward grow as the storages used up to this many moments away."""


def rounded_up(ratio: float) -> float:
    """Return the ratio to plan for, given a ratio to the measured size.

    There are few of them for any sizes: eighths up to the measured size, and eight from
    each size to its double above it.

    Examples:
        >>> rounded_up(0.01), rounded_up(0.5), rounded_up(0.51), rounded_up(2)
        (0.125, 0.5, 0.625, 2.0)
        >>> len({rounded_up(size / 64) for size in range(64, 64 * 16)})
        33
    """
    if ratio <= 1:
        return math.ceil(_STEPS * ratio) / _STEPS
    return 2.0 ** (math.ceil(_STEPS * math.log2(ratio) - _ROUNDING) / _STEPS)


def group_of(measured: Size, size: Size) -> dict[Axis, int]:
    """Return the size that represents all sizes that are planned together.

    It is at least as large as each of them in every dimension.

    Examples:
        >>> group_of({("x", 0): 64, ("x", 1): 7}, {("x", 0): 65, ("x", 1): 7})
        {('x', 0): 69, ('x', 1): 7}
    """
    return {
        axis: length
        if length == measured[axis] or not measured[axis]
        else max(
            length, math.floor(measured[axis] * rounded_up(length / measured[axis]))
        )
        for axis, length in size.items()
    }


class Growth:
    """Predicts the bytes of storages at sizes that have not run.

    Examples:
        >>> base = {("x", 0): 2, ("x", 1): 10}
        >>> growth = Growth(base, (80_000, 800_000))
        >>> growth.predicted({("x", 0): 2, ("x", 1): 20})  # nothing is known yet
        [320000, 3200000]
        >>> growth.add({("x", 0): 2, ("x", 1): 20}, {0: 160_000, 1: 3_200_000})
        >>> growth.predicted({("x", 0): 2, ("x", 1): 30})
        [240000, 7200000]
    """

    def __init__(self, size: Size, storage_bytes: Sequence[int]) -> None:
        self.measured = dict(size)
        self._bytes = tuple(storage_bytes)
        self._seen: list[tuple[dict[Axis, int], dict[int, int]]] = []

    def add(self, size: Size, storage_bytes: Mapping[int, int]) -> None:
        """Add the observed bytes of storages at another size."""
        known = dict(size)
        for other, found in self._seen:
            if other == known:
                found.update(storage_bytes)
                return
        self._seen.append((known, dict(storage_bytes)))

    def predicted(self, size: Size) -> list[int]:
        """Return the bytes of each storage at another size."""
        dimensions = _Dimensions([self.measured, *(s for s, _ in self._seen), size])
        known: dict[tuple[int | None, ...], int] = {}
        rows = [
            (nbytes, *(found.get(number) for _, found in self._seen))
            for number, nbytes in enumerate(self._bytes)
        ]
        for row in rows:
            if row not in known:
                known[row] = _predicted(row, dimensions)
        if self._seen:
            self._infer_unseen(known)
        return [known[row] for row in rows]

    def _infer_unseen(self, known: dict[tuple[int | None, ...], int]) -> None:
        """Let unobserved storages grow as others of their size, or as the fastest.

        Storages that the loss allocates are outside the model's calls: unobserved.
        """
        seen = {row: after for row, after in known.items() if _was_seen(row)}
        ratios: dict[int, float] = {}
        for row, after in seen.items():
            if row[0]:
                ratios[row[0]] = max(ratios.get(row[0], 0.0), after / row[0])
        fastest = max(ratios.values(), default=None)
        if fastest is None:
            return
        for row, after in known.items():
            if row[0] and not _was_seen(row):
                ratio = ratios.get(row[0], fastest)
                known[row] = min(after, math.ceil(row[0] * ratio))


class _Dimensions:
    """The dimensions that differ among some sizes.

    Attributes:
        ratios: For each size, the ratio of each dimension to the measured size.
        powers: For each dimension, its possible powers in the size of a storage.
    """

    def __init__(self, sizes: Sequence[Size]) -> None:
        first = sizes[0]
        axes: dict[tuple[float, ...], list[Axis]] = {}
        for axis, length in first.items():
            if not length or any(axis not in size for size in sizes):
                continue
            ratios = tuple(size[axis] / length for size in sizes)
            if any(ratio != 1 for ratio in ratios):
                axes.setdefault(ratios, []).append(axis)
        if len(axes) > _MOST_DIMENSIONS:
            totals = [_elements(size, first) for size in sizes]
            shares = tuple(total / max(totals[0], 1) for total in totals)
            axes = {shares: [("", 0)]}
        self.ratios = [
            tuple(ratios[number] for ratios in axes) for number in range(len(sizes))
        ]
        self.powers = [range(2 * _multiplicity(found) + 1) for found in axes.values()]

    @cached_property
    def candidates(self) -> list[tuple[int, ...]]:
        """All combinations of powers."""
        return list(itertools.product(*self.powers))

    def factor(self, powers: Sequence[int], start: int, stop: int) -> float:
        """Return the growth factor of a storage from one of the sizes to another."""
        pairs = zip(self.ratios[start], self.ratios[stop], powers, strict=True)
        # A dimension may be empty: growth from there is unknown.
        return math.prod((after / max(before, 1e-9)) ** n for before, after, n in pairs)

    def is_within(self, small: int, large: int) -> bool:
        """Return whether one of the sizes is at most another in every dimension."""
        pairs = zip(self.ratios[small], self.ratios[large], strict=True)
        return all(one <= other for one, other in pairs)

    def distance(self, start: int, stop: int) -> float:
        """Return the distance between two sizes."""
        pairs = zip(self.ratios[start], self.ratios[stop], strict=True)
        return sum(abs(math.log(max(b, 1e-9) / max(a, 1e-9))) for a, b in pairs)


def _predicted(row: tuple[int | None, ...], dimensions: _Dimensions) -> int:
    """Return the predicted bytes at the last size, given those at the others."""
    base, target = row[0], len(row)
    if not base:
        return max(found or 0 for found in row)
    seen = [number for number, nbytes in enumerate(row) if nbytes is not None]
    nearest = min(seen, key=lambda number: dimensions.distance(number, target))
    start_bytes = row[nearest] or 0
    errors: dict[tuple[int, ...], float] = {}
    fitting: list[tuple[int, ...]] = []
    for powers in dimensions.candidates:
        guesses = [base * dimensions.factor(powers, 0, number) for number in seen]
        off = [
            abs(guess - (row[number] or 0))
            for guess, number in zip(guesses, seen, strict=True)
        ]
        errors[powers] = sum(off)
        if all(
            wrong <= _TOLERANCE * guess + 1
            for wrong, guess in zip(off, guesses, strict=True)
        ):
            fitting.append(powers)
    if not fitting:
        # No power fits: take the nearest, scaled by its largest excess.
        best = min(errors, key=errors.__getitem__)
        worst = max(
            (row[n] or 0) / (base * dimensions.factor(best, 0, n)) for n in seen
        )
        found = base * dimensions.factor(best, 0, target) * max(worst, 1.0)
    else:
        factor = max(dimensions.factor(powers, nearest, target) for powers in fitting)
        found = start_bytes * factor
    # A smaller batch makes no larger storages.
    larger = [row[n] or 0 for n in seen if dimensions.is_within(target, n)]
    return math.ceil(min([found, *larger]) - _ROUNDING)


def _was_seen(row: tuple[int | None, ...]) -> bool:
    return any(found is not None for found in row[1:])


def _multiplicity(axes: Sequence[Axis]) -> int:
    """Return how often a dimension occurs in one tensor: 2 for the side of an image."""
    paths = [path for path, _ in axes]
    return max(paths.count(path) for path in paths)


def _elements(size: Size, axes: Mapping[Axis, int]) -> int:
    """Return the number of elements of all tensors."""
    total: dict[str, int] = {}
    for path, axis in axes:
        if axis >= 0 and (path, axis) in size:
            total[path] = total.get(path, 1) * size[path, axis]
    return sum(total.values())


def resized(
    graph: Graph, storage_bytes: Sequence[int], *, added_bytes: int = 0
) -> Graph:
    """Return the step with storages of other sizes.

    Memory that lasts to the end of the step (parameters, gradients) keeps its size.
    Temporaries grow as the storages that are used with them. They do not shrink: where
    they were not observed, the measured amount is safe.

    Examples:
        >>> from recoup.core.graph import Storage
        >>> step = Graph((), 1, (Storage(8, 0, 0),), (), (), (), (5,))
        >>> resized(step, [16], added_bytes=2).storages[0].bytes
        16
    """
    ratios = [
        after / storage.bytes if storage.bytes else 0.0
        for storage, after in zip(graph.storages, storage_bytes, strict=True)
    ]
    whole = sum(storage_bytes) / max(sum(s.bytes for s in graph.storages), 1)
    growth = [_growth_of(graph, operation, ratios) for operation in graph.operations]
    temporary = [*growth, *_backward_growth(graph, ratios)]
    lasting = _lasting(graph)
    return replace(
        graph,
        operations=tuple(
            replace(
                operation,
                seconds=operation.seconds * (ratio or whole),
                workspace_bytes=math.ceil(operation.workspace_bytes * max(ratio, 1.0)),
            )
            for operation, ratio in zip(graph.operations, growth, strict=True)
        ),
        storages=tuple(
            replace(storage, bytes=after)
            for storage, after in zip(graph.storages, storage_bytes, strict=True)
        ),
        other_bytes=tuple(
            added_bytes + lasts + math.ceil((other - lasts) * max(ratio, 1.0))
            for other, lasts, ratio in zip(
                graph.other_bytes, lasting, temporary, strict=True
            )
        ),
        own_bytes=tuple(
            int(own * min(ratio or whole, 1.0))
            for own, ratio in zip(graph.own_bytes, temporary, strict=False)
        ),
        step_seconds=graph.step_seconds * whole,
    )


def on_line(graph: Graph, other: Graph, share: float) -> Graph | None:
    """Return the step at a third size, with bytes on the line through two others.

    Exact for bytes that grow with the number of samples. Times are those of the first.

    `share` is 0 at the first size and 1 at the other.

    Returns:
        None if the operators of the two differ, or there is more than one pass.

    Examples:
        >>> from recoup.core.graph import Storage
        >>> small, large = (Graph((), 1, (), (), (), (), (n,)) for n in (5, 7))
        >>> on_line(small, large, 3.0).other_bytes
        (11,)
    """
    if _shape_of(graph) != _shape_of(other) or graph.others:
        return None

    def at(first: int, second: int) -> int:
        return max(0, math.ceil(first + (second - first) * share))

    return replace(
        graph,
        operations=tuple(
            replace(
                one, workspace_bytes=at(one.workspace_bytes, another.workspace_bytes)
            )
            for one, another in zip(graph.operations, other.operations, strict=True)
        ),
        storages=tuple(
            replace(one, bytes=at(one.bytes, another.bytes))
            for one, another in zip(graph.storages, other.storages, strict=True)
        ),
        other_bytes=tuple(map(at, graph.other_bytes, other.other_bytes)),
        own_bytes=tuple(map(at, graph.own_bytes, other.own_bytes)),
    )


def _shape_of(graph: Graph) -> tuple[object, ...]:
    """Return the properties that two steps share if only sizes and times differ."""
    return (
        [operation.name for operation in graph.operations],
        graph.values,
        graph.saves,
        graph.moments,
        len(graph.own_bytes),
    )


def _growth_of(graph: Graph, operation: Operation, ratios: Sequence[float]) -> float:
    """Return the growth of the fastest growing storage that an operator uses."""
    used = (*operation.reads, *operation.makes)
    return max((ratios[graph.values[value].storage] for value in used), default=0.0)


def _lasting(graph: Graph) -> list[int]:
    """Return how much of the other memory lasts from each moment to the end."""
    least = min(graph.other_bytes, default=0)
    lasting: list[int] = []
    so_far: int | None = None
    own_bytes = graph.own_bytes or (0,) * graph.moments
    for other, own in zip(
        reversed(graph.other_bytes), reversed(own_bytes), strict=True
    ):
        before = max(other - own, least)
        so_far = before if so_far is None else min(so_far, before)
        lasting.append(min(so_far, other))
    return lasting[::-1]


def _backward_growth(graph: Graph, ratios: Sequence[float]) -> list[float]:
    """Return the growth of the temporaries at each moment of backward."""
    forward = len(graph.operations)
    uses = sorted(
        (moment, ratios[graph.values[save.value].storage])
        for save in graph.saves
        for moment in {save.used, min(save.replayed_until, graph.moments)}
        if graph.bytes_of(save.value)
    )
    fastest = max((ratio for _, ratio in uses), default=max(ratios, default=1.0))
    moments = [moment for moment, _ in uses]
    found: list[float] = []
    for moment in range(forward, graph.moments):
        first = bisect_left(moments, moment - _NEAR)
        last = bisect_left(moments, moment + _NEAR + 1)
        near = [ratio for _, ratio in uses[first:last]]
        found.append(max(near, default=fastest))
    return found

"""Models that one step calls in turn: what they take together, and a way for each.

While a model runs, those called before it hold what their backward needs, and those
called after it have left gradients by the time its own backward runs.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from recoup.core.errors import InfeasibleError
from recoup.core.graph import Graph
from recoup.core.segments import Action, Segment
from recoup.core.simulation import Simulation, simulate
from recoup.planners.blocks import blocks_of
from recoup.planners.plan import frontier_with, plan_with
from recoup.planners.search import Search

_SHARES = (0.0, 0.25, 0.5, 0.75)
"""Of what plain autograd holds: plans are looked for that hold no more."""

_FEW = 2000
"""Up to so many combinations of ways are all compared: that takes some 50 ms."""

_PEAKS = 4
"""For how many peaks plans are looked for, besides."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a model, and what it adds to what was in memory before.

    Attributes:
        segments: What is recomputed.
        forward_bytes: The most that forward has in use.
        backward_bytes: The most that backward has in use.
        held_bytes: What is in use between the two.
        seconds: How long forward and backward take.
    """

    segments: tuple[Segment, ...]
    forward_bytes: int
    backward_bytes: int
    held_bytes: int
    seconds: float

    @property
    def added_bytes(self) -> int:
        """The most that is in use at any moment, if nothing else runs in between."""
        return max(self.forward_bytes, self.backward_bytes)


@dataclass(frozen=True, slots=True)
class Part:
    """A model of the step.

    Attributes:
        ways: How it can be run, the fastest first.
        left_bytes: What its backward leaves: gradients of parameters.
    """

    ways: tuple[Way, ...]
    left_bytes: int


def before_bytes(graph: Graph) -> int:
    """Return what is in use before a model is called."""
    return min(graph.other_bytes, default=0)


def way_of(graph: Graph, segments: Sequence[Segment], costs: Simulation) -> Way:
    """Return what running a model so adds to memory."""
    before, half = before_bytes(graph), len(graph.operations)
    return Way(
        tuple(segments),
        max(costs.bytes_at[:half], default=before) - before,
        max(costs.bytes_at[half:], default=before) - before,
        costs.held_bytes + _beside_bytes(graph) - before,
        costs.seconds,
    )


def ways_of(graph: Graph, allow: frozenset[Action]) -> tuple[Way, ...]:
    """Return ways to run a model, the fastest first; they depend on no budget.

    Some are for low peaks, and some hold little while other models run.
    """
    search = Search(graph, allow)
    found = [solution.segments for solution in frontier_with(search, points=_PEAKS)]
    plain = way_of(graph, (), simulate(graph, ()))
    found += _holding_little(graph, allow, plain)
    ways = [way_of(graph, segments, simulate(graph, segments)) for segments in found]
    useful: list[Way] = []
    for way in sorted([plain, *ways], key=lambda way: way.seconds):
        if all(_is_smaller(way, faster) for faster in useful):
            useful.append(way)
    return tuple(useful)


def peak_of(
    row: Sequence[int], parts: Mapping[int, Part], ways: Mapping[int, Way]
) -> int:
    """Return the most that a step adds to memory which calls models in this order.

    Examples:
        >>> first, second = Way((), 5, 9, 4, 1.0), Way((), 6, 7, 2, 1.0)
        >>> parts = {1: Part((first,), 1), 2: Part((second,), 3)}
        >>> peak_of([1, 2], parts, {1: first, 2: second})
        12
    """
    return max(places_of(row, parts, ways), default=0)


def places_of(
    row: Sequence[int], parts: Mapping[int, Part], ways: Mapping[int, Way]
) -> list[int]:
    """Return the most that is in use while each of the called models runs."""
    seen: set[int] = set()
    later: list[int] = []
    total = 0
    for key in reversed(row):
        later.append(total)
        # A model that is called again leaves its gradients once.
        if key not in seen:
            seen.add(key)
            total += parts[key].left_bytes
    found: list[int] = []
    held = 0
    for key, left_bytes in zip(row, reversed(later), strict=True):
        way = ways[key]
        found.append(held + max(way.forward_bytes, way.backward_bytes + left_bytes))
        held += way.held_bytes
    return found


def choose_together(
    rows: Sequence[Sequence[int]], parts: Mapping[int, Part], budget_bytes: int
) -> dict[int, Way]:
    """Return a way for each model with which all rows of calls are within a budget.

    The fastest if there are few to compare, and more budget is never slower. If none
    fits, the one with the lowest peak that was found.

    Examples:
        >>> fast, slow = Way((), 9, 9, 9, 1.0), Way((), 9, 9, 1, 2.0)
        >>> parts = {1: Part((fast, slow), 0), 2: Part((fast, slow), 0)}
        >>> choose_together([[1, 2]], parts, 10) == {1: slow, 2: fast}
        True
    """
    if math.prod(len(part.ways) for part in parts.values()) <= _FEW:
        return _fastest(rows, parts, budget_bytes)
    return _descended(rows, parts, budget_bytes)


def _fastest(
    rows: Sequence[Sequence[int]], parts: Mapping[int, Part], budget_bytes: int
) -> dict[int, Way]:
    """Compare all there are."""

    def rank(ways: Mapping[int, Way]) -> tuple[int, float, int]:
        peak_bytes = max(peak_of(row, parts, ways) for row in rows)
        excess = max(0, peak_bytes - budget_bytes)
        times = sum(ways[key].seconds for row in rows for key in row)
        return excess, times, peak_bytes

    every = itertools.product(*(part.ways for part in parts.values()))
    return min((dict(zip(parts, each, strict=True)) for each in every), key=rank)


def _descended(
    rows: Sequence[Sequence[int]], parts: Mapping[int, Part], budget_bytes: int
) -> dict[int, Way]:
    """Go down from the fastest ways.

    Where the peak is, that model's way is changed which takes the most bytes off it
    for the time that it adds. The budget says only where to stop.
    """
    ways = {key: part.ways[0] for key, part in parts.items()}
    seen = {_names(ways)}
    while True:
        places = [places_of(row, parts, ways) for row in rows]
        peak_bytes = max(map(max, places))
        if peak_bytes <= budget_bytes:
            return ways
        number = next(n for n, each in enumerate(places) if max(each) == peak_bytes)
        position = places[number].index(peak_bytes)
        for key, way in _moves(rows[number][: position + 1], parts, ways):
            changed = {**ways, key: way}
            if _names(changed) in seen:
                continue
            if max(peak_of(row, parts, changed) for row in rows) <= peak_bytes:
                ways = changed
                seen.add(_names(ways))
                break
        else:
            return ways


def loaded(
    graph: Graph,
    key: int,
    *,
    rows: Sequence[Sequence[int]],
    parts: Mapping[int, Part],
    ways: Mapping[int, Way],
) -> Graph:
    """Return the graph of a model with what the others of its rows take beside it.

    A plan of it that is within a budget leaves the step within it. (The longest that
    others need is in use at the last moment of forward, when backward is to begin.)
    """
    before_it = after_it = left_bytes = 0
    for row in rows:
        places = places_of(row, parts, ways)
        held = 0
        for position, each in enumerate(row):
            if each == key:
                later = set(row[position + 1 :])
                before_it = max(before_it, held)
                after_it = max(after_it, max(places[position:]) - held)
                left_bytes = max(left_bytes, sum(parts[k].left_bytes for k in later))
            held += ways[each].held_bytes
    half = len(graph.operations)
    added = [before_it] * half + [before_it + left_bytes] * graph.backward
    if half:
        # The gradient that backward begins with is made there, and is not yet held.
        last = simulate(graph, ways[key].segments).settled_at[half - 1] - before_bytes(
            graph
        )
        added[half - 1] += max(0, after_it - last)
    other = zip(graph.other_bytes, added, strict=True)
    return replace(graph, other_bytes=tuple(a + b for a, b in other))


def _names(ways: Mapping[int, Way]) -> tuple[int, ...]:
    return tuple(map(id, ways.values()))


def _moves(
    row: Sequence[int], parts: Mapping[int, Part], ways: Mapping[int, Way]
) -> Iterator[tuple[int, Way]]:
    """Yield other ways that take bytes off the last place of a row, the best first."""
    found: list[tuple[float, int, Way]] = []
    for key in dict.fromkeys(row):
        now = ways[key]
        times = row[:-1].count(key) if len(row) > 1 else 0
        for way in parts[key].ways:
            off = times * (now.held_bytes - way.held_bytes)
            if key == row[-1]:
                off += now.added_bytes - way.added_bytes
            if off > 0:
                seconds = max(way.seconds - now.seconds, 1e-9)
                found.append((off / seconds, key, way))
    for _, key, way in sorted(found, key=lambda move: -move[0]):
        yield key, way


def _holding_little(
    graph: Graph, allow: frozenset[Action], plain: Way
) -> Iterator[tuple[Segment, ...]]:
    """Yield plans that hold no more than some shares of what the plain step does."""
    blocks = blocks_of(graph)
    half = len(graph.operations)
    if not blocks or not half or graph.model_calls != 1:
        return
    yield tuple(Segment(start, stop) for start, stop in blocks)
    yield (Segment(blocks[0][0], blocks[-1][1]),)
    # Between forward and backward memory is full of something else.
    load = 2 * plain.added_bytes
    other = list(graph.other_bytes)
    other[half - 1] += load
    search = Search(replace(graph, other_bytes=tuple(other)), allow)
    last = simulate(graph, ()).settled_at[half - 1] - plain.held_bytes + load
    for share in _SHARES:
        with suppress(InfeasibleError):
            yield plan_with(search, last + int(share * plain.held_bytes)).segments


def _beside_bytes(graph: Graph) -> int:
    """Return what is in use between forward and backward that no plan decides on."""
    half = len(graph.operations)
    return graph.other_bytes[half - 1] if half else before_bytes(graph)


def _is_smaller(way: Way, other: Way) -> bool:
    """Return whether a way takes less than another, at any time."""
    return (
        way.held_bytes < other.held_bytes
        or way.forward_bytes < other.forward_bytes
        or way.backward_bytes < other.backward_bytes
    )

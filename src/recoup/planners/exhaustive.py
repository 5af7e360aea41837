"""Exhaustive search, for small graphs."""

from collections.abc import Iterator
from itertools import chain, combinations, product
from math import prod

from recoup.core.graph import Graph
from recoup.core.memory_use import MemoryUse
from recoup.core.segments import Interval, Segment
from recoup.planners.interval_options import (
    Option,
    footprints_of,
    holding,
    keep_all,
    kept_around,
    segments_of,
)

_MOST = 2000
"""The maximum number of plans to try."""


def exhaustive(
    graph: Graph,
    intervals: tuple[Interval, ...],
    budget_bytes: int,
    *,
    most: int = _MOST,
) -> tuple[Segment, ...] | None:
    """Return the fastest plan of a class within a budget; None: none, or too many.

    The class: every interval is kept whole, or is one segment that holds any set of the
    values made in it.

    None is returned if there are more than `most` plans.
    """
    found = _plans(graph, intervals, most)
    if found is None:
        return None
    use, plans = found
    best: tuple[float, tuple[Option, ...]] | None = None
    for options in plans:
        seconds = sum(option.seconds for option in options)
        if best is not None and seconds >= best[0]:
            continue
        if use.peak_bytes(footprints_of(options)) <= budget_bytes:
            best = seconds, options
    return None if best is None else segments_of(best[1])


def smallest(
    graph: Graph, intervals: tuple[Interval, ...]
) -> tuple[Segment, ...] | None:
    """Return the plan of that class with the minimum peak; None: there are too many."""
    found = _plans(graph, intervals, _MOST)
    if found is None:
        return None
    use, plans = found
    return segments_of(min(plans, key=lambda o: use.peak_bytes(footprints_of(o))))


def _plans(
    graph: Graph, intervals: tuple[Interval, ...], most: int
) -> tuple[MemoryUse, Iterator[tuple[Option, ...]]] | None:
    """Return the memory of the step and all plans; None: there are too many."""
    if prod(2 ** len(_holdable(graph, each)) + 1 for each in intervals) > most:
        return None
    use = MemoryUse(graph, [kept_around(graph, intervals)])
    return use, product(*(_options(graph, interval) for interval in intervals))


def _holdable(graph: Graph, interval: Interval) -> list[int]:
    return [
        value
        for number in graph.operations_between(*interval)
        for value in graph.operations[number].makes
        if graph.values[value].holdable
    ]


def _options(graph: Graph, interval: Interval) -> list[Option]:
    values = _holdable(graph, interval)
    sets = chain.from_iterable(
        combinations(values, size) for size in range(len(values) + 1)
    )
    return [
        keep_all(graph, *interval),
        *(holding(graph, *interval, held) for held in sets),
    ]

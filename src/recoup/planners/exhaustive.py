"""Try everything, where there is little to try."""

from itertools import chain, combinations, product
from math import prod

from recoup.core.graph import Graph
from recoup.core.memory_use import MemoryUse
from recoup.core.segments import Segment, Stretch
from recoup.planners.option import (
    Option,
    footprints_of,
    holding,
    keep_all,
    kept_around,
)


def exhaustive(
    graph: Graph, stretches: tuple[Stretch, ...], budget_bytes: int, *, most: int = 2000
) -> tuple[Segment, ...] | None:
    """Return the fastest plan of a class within a budget; None: none, or too many.

    The class: every stretch is kept whole, or is one segment that holds any set of the
    values made in it.

    Args:
        graph: The step.
        stretches: Where segments begin and end.
        budget_bytes: The most bytes in use.
        most: How many plans are tried at most; with more there is no answer.

    Examples:
        >>> exhaustive(Graph((), 0, (), (), (), (), ()), (), 0)
        ()
    """
    if _count(graph, stretches) > most:
        return None
    use = MemoryUse(graph, [kept_around(graph, stretches)])
    best: tuple[float, tuple[Option, ...]] | None = None
    for options in product(*(_options(graph, stretch) for stretch in stretches)):
        seconds = sum(option.seconds for option in options)
        if best is not None and seconds >= best[0]:
            continue
        if use.peak_bytes(footprints_of(options)) <= budget_bytes:
            best = seconds, options
    if best is None:
        return None
    return tuple(segment for option in best[1] for segment in option.segments)


def smallest(
    graph: Graph, stretches: tuple[Stretch, ...], *, most: int = 2000
) -> tuple[Segment, ...] | None:
    """Return the plan of that class with the lowest peak; None: there are too many.

    Examples:
        >>> smallest(Graph((), 0, (), (), (), (), ()), ())
        ()
    """
    if _count(graph, stretches) > most:
        return None
    use = MemoryUse(graph, [kept_around(graph, stretches)])
    every = product(*(_options(graph, stretch) for stretch in stretches))
    best = min(every, key=lambda options: use.peak_bytes(footprints_of(options)))
    return tuple(segment for option in best for segment in option.segments)


def _count(graph: Graph, stretches: tuple[Stretch, ...]) -> int:
    return prod(2 ** len(_holdable(graph, stretch)) + 1 for stretch in stretches)


def _holdable(graph: Graph, stretch: Stretch) -> list[int]:
    return [
        value
        for number in graph.operations_between(*stretch)
        for value in graph.operations[number].makes
        if graph.values[value].holdable
    ]


def _options(graph: Graph, stretch: Stretch) -> list[Option]:
    values = _holdable(graph, stretch)
    sets = chain.from_iterable(
        combinations(values, size) for size in range(len(values) + 1)
    )
    return [
        keep_all(graph, *stretch),
        *(holding(graph, *stretch, held) for held in sets),
    ]

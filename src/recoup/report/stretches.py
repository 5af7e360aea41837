"""Stretches: forward cut into its blocks, each with a name that a person knows."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from recoup.core.graph import Boundary, Graph
from recoup.planners.blocks import blocks_of


@dataclass(frozen=True, slots=True)
class Stretch:
    """A block of forward, or what runs before the first or after the last.

    Attributes:
        name: What it is called.
        first: Its first operation.
        stop: The operation after its last.
    """

    name: str
    first: int
    stop: int


def stretches(graph: Graph) -> tuple[Stretch, ...]:
    """Return the blocks of a step in order; together they are all of forward.

    Examples:
        >>> from recoup.core.graph import Operation
        >>> operations = tuple(Operation("aten.mm", 1.0, (), ()) for _ in range(3))
        >>> places = (Boundary(0, 0, "", 0), Boundary(1, 0, "h.0"), Boundary(2, 0, ""))
        >>> graph = Graph(operations, 0, (), (), (), places, (0,) * 3, blocks=(0, 1, 2))
        >>> [stretch.name for stretch in stretches(graph)]
        ['before h.0', 'h.0', 'the loss']
    """
    found: list[Stretch] = []
    seen: Counter[str] = Counter()

    def add(name: str, first: int, stop: int) -> None:
        if first < stop:
            seen[name] += 1
            again = f" ({seen[name]})" if seen[name] > 1 else ""
            found.append(Stretch(name + again, first, stop))

    position = 0
    for start, stop in blocks_of(graph):
        begin, end = graph.boundaries[start], graph.boundaries[stop]
        add("before the model", position, begin.operation)
        add(_name(begin, end), begin.operation, end.operation)
        position = end.operation
    add("the loss" if found else "the step", position, len(graph.operations))
    return tuple(found)


def stretch_of(found: Sequence[Stretch], operation: int) -> int:
    """Return the number of the stretch in which an operation runs.

    Examples:
        >>> stretch_of([Stretch("a", 0, 2), Stretch("b", 2, 3)], 2)
        1
    """
    return bisect_right(found, operation, key=lambda stretch: stretch.first) - 1


def _name(begin: Boundary, end: Boundary) -> str:
    if not end.entering and end.module:
        return _called(end)
    if begin.entering and begin.module:
        return _called(begin)
    if end.module:
        return f"before {_called(end)}"
    if begin.module:
        return f"after {_called(begin)}"
    return "the model"


def _called(boundary: Boundary) -> str:
    name = boundary.module
    if name.isdigit():
        name = f"block {name}"
    return f"{name}#{boundary.call}" if boundary.call else name

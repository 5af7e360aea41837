"""Modules: the block and the module of each operator of forward."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import groupby

from recoup.core.graph import Boundary, Graph
from recoup.planners.baselines import blocks_of
from recoup.report.findings import BlockRow, PlanView, Step


@dataclass(frozen=True, slots=True)
class NamedBlock:
    """A block of forward, or the operators before the first or after the last.

    Attributes:
        name: Its name.
        first: Its first operation.
        stop: The operation after its last.
    """

    name: str
    first: int
    stop: int


def named_blocks(graph: Graph) -> tuple[NamedBlock, ...]:
    """Return the blocks of a pass in order; together they cover forward.

    Examples:
        >>> from recoup.core.graph import Operation
        >>> operations = tuple(Operation("aten.mm", 1.0, (), ()) for _ in range(3))
        >>> places = (Boundary(0, 0, "", 0), Boundary(1, 0, "h.0"), Boundary(2, 0, ""))
        >>> graph = Graph(operations, 0, (), (), (), places, (0,) * 3, blocks=(0, 1, 2))
        >>> [block.name for block in named_blocks(graph)]
        ['before h.0', 'h.0', 'the loss']
    """
    found: list[NamedBlock] = []
    seen: Counter[str] = Counter()

    def add(name: str, first: int, stop: int) -> None:
        if first < stop:
            seen[name] += 1
            again = f" ({seen[name]})" if seen[name] > 1 else ""
            found.append(NamedBlock(name + again, first, stop))

    position = 0
    for start, stop in blocks_of(graph):
        begin, end = graph.boundaries[start], graph.boundaries[stop]
        add("before the model", position, begin.operation)
        add(_name(begin, end), begin.operation, end.operation)
        position = end.operation
    add("the loss" if found else "the step", position, len(graph.operations))
    return tuple(found)


def block_of(blocks: Sequence[NamedBlock], operation: int) -> NamedBlock:
    """Return the block in which an operation runs.

    Examples:
        >>> block_of([NamedBlock("a", 0, 2), NamedBlock("b", 2, 3)], 2).name
        'b'
    """
    return blocks[bisect_right(blocks, operation, key=lambda block: block.first) - 1]


def block_rows(
    step: Step, view: PlanView, *, merge: bool = False
) -> tuple[BlockRow, ...]:
    """Return the effect of a plan on each block, in the order of forward.

    With `merge`, neighbours with the same action and saved bytes share a row.
    """
    pairs = zip(step.parts, view.costs, strict=True)
    parts = [
        BlockRow(part.block, *astuple(part)[2:], *astuple(cost)) for part, cost in pairs
    ]
    named = groupby(parts, key=lambda part: part.name)
    rows = tuple(_sum(name, list(group)) for name, group in named)
    if not merge:
        return rows
    groups = groupby(rows, key=lambda row: (row.action, row.saved_bytes))
    return tuple(_joined(list(group)) for _, group in groups)


def _sum(name: str, rows: Sequence[BlockRow]) -> BlockRow:
    """Return rows added up, under a name."""
    numbers = (astuple(row)[1:] for row in rows)
    return BlockRow(name, *map(sum, zip(*numbers, strict=True)))


def _joined(rows: Sequence[BlockRow]) -> BlockRow:
    if len(rows) == 1:
        return rows[0]
    first, last = rows[0].name, rows[-1].name
    return _sum(f"{first} to {_without_parent(last, first)}", rows)


def _without_parent(name: str, other: str) -> str:
    """Return the last part of a path whose parent another path shares."""
    parent, dot, last = name.rpartition(".")
    return f".{last}" if dot and other.startswith(f"{parent}.") else name


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

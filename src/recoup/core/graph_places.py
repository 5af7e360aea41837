"""Places in a step: the module of each operator, and what backward needs next."""

from itertools import pairwise, takewhile

from recoup.core.graph import Boundary, Graph


def module_paths(graph: Graph) -> list[str]:
    """Return the path of the innermost known module around each operation of forward.

    Of several boundaries at one place a graph has one. Still, what runs before a module
    is left runs in it, and what runs before one is entered runs in the module around
    it. Where a module and the one around it end at one place, it is the latter.

    Examples:
        >>> from recoup.core.graph import Operation
        >>> operations = tuple(Operation("aten.mm", 1.0, (), ()) for _ in range(3))
        >>> places = (
        ...     Boundary(0, 0, "h.0"),
        ...     Boundary(1, 0, "h.0.up", entering=False),
        ...     Boundary(2, 0, "h.0.down"),
        ...     Boundary(3, 0, "h.0", entering=False),
        ... )
        >>> module_paths(Graph(operations, 0, (), (), (), places, (0,) * 3))
        ['h.0.up', 'h.0', 'h.0']
    """
    paths = [""] * len(graph.operations)
    for begin, end in pairwise(graph.boundaries):
        if begin.operation < end.operation:
            path = _between(begin, end)
            for operation in range(begin.operation, end.operation):
                paths[operation] = path
    return paths


def next_needed(graph: Graph) -> list[int | None]:
    """Return for each moment whose saved result backward needs next, if any.

    Examples:
        >>> from recoup.core.graph import Operation, Save, Storage, Value
        >>> graph = Graph(
        ...     operations=(Operation("exp", 1.0, (), (0,)),),
        ...     backward=2,
        ...     storages=(Storage(8, 0, 0),),
        ...     values=(Value(0, 0),),
        ...     saves=(Save(0, 1, 1),),
        ...     boundaries=(),
        ...     other_bytes=(0,) * 3,
        ... )
        >>> next_needed(graph)
        [0, 0, None]
    """
    producers = [(save.used, graph.values[save.value].producer) for save in graph.saves]
    saves = sorted(pair for pair in producers if pair[1] >= 0)
    found: list[int | None] = []
    position = 0
    for moment in range(graph.moments):
        while position < len(saves) and saves[position][0] < moment:
            position += 1
        found.append(saves[position][1] if position < len(saves) else None)
    return found


def _between(begin: Boundary, end: Boundary) -> str:
    if not end.entering:
        return end.module
    around = f"{begin.module}." if begin.module else ""
    if begin.entering and end.module.startswith(around):
        return begin.module
    pairs = zip(begin.module.split("."), end.module.split("."), strict=False)
    return ".".join(
        name for name, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)
    )

"""Plans in which whole calls of blocks are repeated in backward, and nothing else.

They record nothing. With small operators, recording takes more host time than a better
plan saves on the device.
"""

from bisect import bisect_left
from collections.abc import Sequence

from recoup.core.graph import BlockCall, Graph
from recoup.core.segments import Segment
from recoup.core.simulation import simulate

_TRIES = 32
"""The number of calls that are tried, one by one, to remain unrepeated."""


def repeatable_calls(graph: Graph) -> tuple[BlockCall, ...]:
    """Return the calls that may be repeated: all their operators can run again."""
    found: list[BlockCall] = []
    for call in graph.calls:
        inside = graph.operations_between(call.start, call.stop)
        operations = graph.operations[inside.start : inside.stop]
        if (
            call.module in graph.repeatable
            and operations
            and all(each.replayable and not each.state_bytes for each in operations)
            and (not found or found[-1].stop <= call.start)
        ):
            found.append(call)
    return tuple(found)


def repeat_calls(graph: Graph, budget_bytes: int) -> tuple[Segment, ...] | None:
    """Return as few repeated calls as fit the budget; None if not even all do.

    Backward releases the values of the last calls first, before earlier calls are
    repeated. So the longest suffix of calls that fits is not repeated, and then any
    other call that fits besides.

    Examples:
        >>> repeat_calls(Graph((), 0, (), (), (), (), ()), 0) is None
        True
    """
    calls = repeatable_calls(graph)
    if not calls or not _fits(graph, calls, budget_bytes):
        return None
    least = bisect_left(
        range(1, len(calls)),
        True,
        key=lambda count: _fits(graph, calls[:count], budget_bytes),
    )
    repeated = list(calls[: 1 + least])
    for call in sorted(repeated, key=lambda c: -_seconds(graph, c))[:_TRIES]:
        others = [each for each in repeated if each is not call]
        if _fits(graph, others, budget_bytes):
            repeated = others
    return _segments(repeated)


def _segments(calls: Sequence[BlockCall]) -> tuple[Segment, ...]:
    return tuple(Segment(call.start, call.stop, by_call=True) for call in calls)


def _fits(graph: Graph, calls: Sequence[BlockCall], budget_bytes: int) -> bool:
    return simulate(graph, _segments(calls)).peak_bytes <= budget_bytes


def _seconds(graph: Graph, call: BlockCall) -> float:
    inside = graph.operations_between(call.start, call.stop)
    return sum(graph.operations[number].seconds for number in inside)

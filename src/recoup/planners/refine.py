"""Use the last bytes: hold further values, one by one, until none fits."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from recoup.core.graph import Graph
from recoup.core.memory_use import MemoryUse
from recoup.core.segments import Action, Segment
from recoup.planners.interval_options import Option, footprints_of, kept_around, nested

_FILLS = 24
"""The number of values tried in place of a dropped one."""

_SWAPS = 32


def refine(
    graph: Graph, segments: Sequence[Segment], budget_bytes: int, *, swaps: bool = True
) -> tuple[Segment, ...]:
    """Return a plan that is no slower than another and fits the same budget.

    Results of more operators are held, the slowest operators first, until no further
    result fits. Before that, values that are cheap to recompute are dropped for others
    that take longer. Nested segments stay unchanged.

    Costs a footprint and the bytes at all moments for each value that may fit, and a
    few hundred of both for the exchange.
    """
    if not segments:
        return ()
    around = kept_around(graph, [(s.start, s.stop) for s in segments])
    refiner = _Refiner(graph, MemoryUse(graph, [around]), budget_bytes)
    options = [nested(graph, segment) for segment in segments]
    if not _FreeBytes(refiner, options).is_enough:
        return tuple(segments)
    options = refiner.filled(options)
    for number, value in refiner.held(options)[: _SWAPS if swaps else 0]:
        without = refiner.replaced(options, number, drop=value)
        trial = refiner.filled(without, most=_FILLS)
        if _seconds(trial) < _seconds(options):
            options = refiner.filled(trial)
    return tuple(option.segments[0] for option in options)


class _More(NamedTuple):
    """Results of an operator that may be held in addition.

    Attributes:
        order: The negative seconds of the operator: the smallest is tried first.
        values: Its results that are needed.
        until: A moment of backward before which holding them changes nothing else.
        storages: The storages of the values.
        least_bytes: The least bytes they add, if nothing else holds the storages.
    """

    order: float
    values: tuple[int, ...]
    until: int
    storages: frozenset[int]
    least_bytes: int


@dataclass(frozen=True)
class _Refiner:
    graph: Graph
    use: MemoryUse
    budget_bytes: int
    _known: dict[int, tuple[Option, list[_More]]] = field(
        default_factory=dict[int, tuple[Option, list[_More]]]
    )

    def filled(self, options: list[Option], *, most: int | None = None) -> list[Option]:
        """Return options that hold as much as fits.

        At most `most` values are tried; None: until none fits.
        """
        tried = 0
        found = True
        room = _FreeBytes(self, options)
        while found and (most is None or tried < most):
            found = False
            for more, number in self.recomputed(options):
                if most is not None and tried >= most:
                    break
                if not room.may_hold(more):
                    continue
                tried += 1
                trial = self.replaced(options, number, keep=more.values)
                if trial[number].seconds >= options[number].seconds:
                    continue
                left = _FreeBytes(self, trial)
                if left.is_enough:
                    options, room, found = trial, left, True
        return options

    def replaced(
        self,
        options: list[Option],
        number: int,
        *,
        keep: tuple[int, ...] = (),
        drop: int | None = None,
    ) -> list[Option]:
        """Return options with more values held in one, or one value less."""
        segment = options[number].segments[0]
        actions = {v: a for v, a in segment.actions.items() if v != drop}
        actions.update(dict.fromkeys(keep, Action.KEEP))
        option = nested(self.graph, Segment(segment.start, segment.stop, actions))
        return [*options[:number], option, *options[number + 1 :]]

    def recomputed(self, options: Sequence[Option]) -> list[tuple[_More, int]]:
        """Return the results that are recomputed, with the option, slowest first."""
        found: list[tuple[_More, int]] = []
        for number, option in enumerate(options):
            if option.segments[0].inner or option.segments[0].by_call:
                continue
            if id(option) not in self._known:
                self._known[id(option)] = option, list(self._made_again(option))
            found += [(more, number) for more in self._known[id(option)][1]]
        return sorted(found, key=lambda one: one[0].order)

    def _made_again(self, option: Option) -> Iterator[_More]:
        graph = self.graph
        freed = _freed(graph, option, self._saved)
        for replay in option.footprint.replays:
            for place in replay.operations:
                operation = graph.operations[place]
                values = tuple(v for v in operation.makes if v in self._used)
                storages = frozenset(graph.values[v].storage for v in values)
                nbytes = sum(graph.storages[s].bytes for s in storages)
                if values:
                    yield _More(
                        -operation.seconds,
                        values,
                        replay.moment,
                        storages,
                        nbytes - freed[place],
                    )

    @cached_property
    def _saved(self) -> frozenset[int]:
        return frozenset(save.value for save in self.graph.saves)

    @cached_property
    def _used(self) -> set[int]:
        """The values that may be held and that are needed."""
        graph = self.graph
        used = self._saved.union(*(each.reads for each in graph.operations))
        return {value for value in used if graph.values[value].holdable}

    def held(self, options: Sequence[Option]) -> list[tuple[int, int]]:
        """Return the held values with their segments, the cheapest first."""
        graph = self.graph
        found = [
            (
                graph.operations[graph.values[value].producer].seconds
                / graph.bytes_of(value),
                number,
                value,
            )
            for number, option in enumerate(options)
            if not option.segments[0].inner
            for value, action in option.segments[0].actions.items()
            if action is Action.KEEP and graph.bytes_of(value)
        ]
        return [(number, value) for _, number, value in sorted(found)]


class _FreeBytes:
    """The unused bytes of the budget at each moment, with some options.

    Attributes:
        is_enough: Whether there are any at each moment.
    """

    def __init__(self, refiner: _Refiner, options: Sequence[Option]) -> None:
        use = refiner.use
        spans = use.spans(footprints_of(options))
        self._room = refiner.budget_bytes - use.bytes_of(spans)
        self.is_enough = bool(self._room.min(initial=0) >= 0)
        self._sizes = refiner.graph.sizes
        self._half = use.half
        # A view is read as whole numbers of Python, and copies nothing.
        self._until = spans.last[: len(self._sizes)].data

    @cached_property
    def _forward(self) -> memoryview:
        """The least room from each moment of forward to its end."""
        return np.minimum.accumulate(self._room[: self._half][::-1])[::-1].data

    @cached_property
    def _backward(self) -> memoryview:
        """The least room from the begin of backward to each of its moments."""
        return np.minimum.accumulate(self._room[self._half :]).data

    def may_hold(self, more: _More) -> bool:
        """Return whether there is room until the first moment that it changes.

        A fast lower bound, which rules out values that do not fit.
        """
        until, last = self._until, self._half - 1
        first, is_new, least_bytes = 0, False, more.least_bytes
        for storage in more.storages:
            if until[storage] < last:
                is_new, first = True, max(first, until[storage] + 1)
            else:
                least_bytes -= self._sizes[storage]
        if not is_new or least_bytes <= 0:
            return True
        if least_bytes > self._forward[first]:
            return False
        moments = more.until - self._half
        return not moments or least_bytes <= self._backward[moments - 1]


def _freed(graph: Graph, option: Option, saved: Set[int]) -> dict[int, int]:
    """Return the bytes that a segment may drop if an operator's results are held.

    At most the roots that only that operator, and those that lead to it, start from.
    """
    ((_, roots),) = option.footprint.starts
    starts = {value: 0 for value in roots if value not in saved}
    leads: dict[int, int] = {}
    numbers = [n for replay in option.footprint.replays for n in replay.operations]
    for bit, number in enumerate(numbers):
        leads[number] = 1 << bit
        for value in graph.operations[number].reads:
            leads[number] |= leads.get(graph.values[value].producer, 0)
            if value in starts:
                starts[value] |= 1 << bit
    return {
        number: sum(
            graph.bytes_of(value)
            for value, readers in starts.items()
            if not readers & ~before
        )
        for number, before in leads.items()
    }


def _seconds(options: Sequence[Option]) -> float:
    return sum(option.seconds for option in options)

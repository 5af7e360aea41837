"""Cuts of forward: a dynamic program over the places where segments may begin.

A plan is a path from the first place to the last; each step of it is an interval with
one of a few options. While backward replays an interval, memory holds the values of the
earlier intervals. So a label needs only bytes held and seconds, and the best labels
form a Pareto front.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from recoup.core.graph import Floats, Graph, Integers
from recoup.core.segments import Interval, Segment, within_runs
from recoup.core.simulation import simulate
from recoup.core.trim_segments import without_idle_actions
from recoup.planners.baselines import blocks_of, recompute_all, square_root
from recoup.planners.exhaustive import smallest
from recoup.planners.interval_options import (
    IntervalOption,
    IntervalOptions,
    Memory,
    Option,
    segments_of,
)

Path = tuple[tuple[Interval, Option], ...]
"""Intervals in order, with the option of each."""

_LABELS = 128
_NOWHERE = np.iinfo(np.int64).max // 4


class Partition:
    """All plans over some places.

    Args:
        graph: The step.
        places: Boundaries, in order, where segments may begin and end.
        reach: The maximum number of places that a segment spans.
        nest: Whether nested segments are tried.
        memory: A cache of the costs of the step's intervals.
    """

    def __init__(
        self,
        graph: Graph,
        places: Sequence[int],
        *,
        reach: int,
        nest: bool = False,
        memory: Memory | None = None,
    ) -> None:
        self.graph = graph
        self.places = tuple(places)
        memory = Memory() if memory is None else memory
        held_sets = memory.held_sets(graph, places[0], places[-1])
        options = IntervalOptions(graph, places, held_sets, nest=nest, memory=memory)
        self._highest = options.natural_bytes + sum(s.bytes for s in graph.storages)
        self._steps: list[list[_Step]] = [[]]
        for stop in range(1, len(places)):
            starts = range(max(0, stop - reach), stop)
            self._steps.append([_Step(n, options.between(n, stop)) for n in starts])

    def best(self, budget_bytes: int) -> Path | None:
        """Return the fastest path that fits by the counts here, or None."""
        fronts: list[_Front] = [_Front.origin()]
        for steps in self._steps[1:]:
            fronts.append(_Front.reached(fronts, steps, budget_bytes))
        if not len(fronts[-1].seconds):
            return None
        return self._walk_back(fronts)

    def lowest(self) -> int:
        """Return the smallest budget with a path, by the counts here."""
        every = [_joined(steps) for steps in self._steps[1:]]
        low, high = 0, self._highest
        while high - low > max(1, high // 10_000):
            middle = (low + high) // 2
            if _is_enough(every, middle):
                high = middle
            else:
                low = middle
        return high

    def _walk_back(self, fronts: Sequence["_Front"]) -> Path:
        label = int(fronts[-1].seconds.argmin())
        stop = len(fronts) - 1
        path: list[tuple[Interval, Option]] = []
        while stop:
            front = fronts[stop]
            step = self._steps[stop][int(front.step[label])]
            option = step.options[int(front.choice[label])]
            path.append(((self.places[step.start], self.places[stop]), option.make()))
            label, stop = int(front.label[label]), step.start
        return tuple(reversed(path))


class _Step:
    """All options from one place to another, as arrays."""

    def __init__(self, start: int, options: Sequence[IntervalOption]) -> None:
        self.start = start
        self.options = options
        self.held = np.array([option.held_bytes for option in options], dtype=np.int64)
        self.peak = np.array([option.peak_bytes for option in options], dtype=np.int64)
        self.seconds = np.array(
            [option.seconds for option in options], dtype=np.float64
        )


def _joined(steps: Sequence[_Step]) -> tuple[Integers, Integers, Integers]:
    """Return the starts of all options to one place, their held bytes and peaks."""
    starts = np.repeat([step.start for step in steps], [len(s.options) for s in steps])
    held = np.concatenate([step.held for step in steps])
    return starts, held, np.concatenate([step.peak for step in steps])


def _is_enough(
    every: Sequence[tuple[Integers, Integers, Integers]], budget_bytes: int
) -> bool:
    """Return whether there is a path: the one that holds least fits if any does."""
    least = np.full(len(every) + 1, _NOWHERE)
    least[0] = 0
    for stop, (starts, held, peak) in enumerate(every, 1):
        before = least[starts]
        reached = (before + held)[before + peak <= budget_bytes]
        least[stop] = reached.min(initial=_NOWHERE)
    return bool(least[-1] < _NOWHERE)


@dataclass(frozen=True)
class _Front:
    """The Pareto-optimal labels of one place.

    Attributes:
        held: Bytes held when forward reaches the place.
        seconds: The time of recomputing.
        step: The number of the last step to the place.
        choice: The option of that interval.
        label: The label at its start.
    """

    held: Integers
    seconds: Floats
    step: Integers
    choice: Integers
    label: Integers

    @staticmethod
    def origin() -> "_Front":
        zero = np.zeros(1, dtype=np.int64)
        return _Front(zero, np.zeros(1), zero, zero, zero)

    @staticmethod
    def reached(
        fronts: Sequence["_Front"], steps: Sequence[_Step], budget_bytes: int
    ) -> "_Front":
        """Return the labels at the end of steps, from those at their starts."""
        starts = [fronts[step.start] for step in steps]
        held = _sums([front.held for front in starts], [step.held for step in steps])
        peak = _sums([front.held for front in starts], [step.peak for step in steps])
        seconds = _sums(
            [front.seconds for front in starts], [step.seconds for step in steps]
        )
        seconds[peak > budget_bytes] = np.inf
        order = _pareto_optimal(held, seconds)
        if len(order) > _LABELS:
            order = order[np.linspace(0, len(order) - 1, _LABELS).astype(np.int64)]
        options = np.array([len(step.options) for step in steps])
        sizes = options * [len(front.held) for front in starts]
        ends = np.cumsum(sizes)
        number = np.searchsorted(ends, order, side="right")
        label, choice = np.divmod(order - (ends - sizes)[number], options[number])
        return _Front(held[order], seconds[order], number, choice, label)


def _sums(labels: Sequence[Any], options: Sequence[Any]) -> Any:
    """Return the sums of each label and each option, for one step after the other."""
    pairs = zip(labels, options, strict=True)
    return np.concatenate([np.add.outer(*pair).ravel() for pair in pairs])


def _pareto_optimal(held: Integers, seconds: Floats) -> Integers:
    """Return the places of Pareto-optimal pairs of finite seconds, by bytes held.

    The first of equal pairs is returned.

    Examples:
        >>> seconds = np.array([2.0, 3.0, 1.0, np.inf, 1.0, 1.0])
        >>> _pareto_optimal(np.array([5, 5, 7, 1, 7, 8]), seconds).tolist()
        [0, 2]
    """
    # One key is sorted ten times as fast as two: the ties wait for the few that remain.
    order = np.argsort(held)
    ordered = seconds[order]
    near = (ordered <= np.minimum.accumulate(ordered)) & (ordered < np.inf)
    near = np.sort(order[near])
    near = near[np.lexsort((seconds[near], held[near]))]
    lowest = np.minimum.accumulate(seconds[near])
    return near[np.concatenate([[True], lowest[1:] < lowest[:-1]])[: len(near)]]


def lowest_plan(
    graph: Graph,
    places: Sequence[int],
    *,
    reach: int,
    memory: Memory | None = None,
) -> tuple[Segment, ...]:
    """Return the plan with the minimum peak that the planner finds.

    Among plans with equal peaks, the one that recomputes the fewest operators wins. So
    two measurements of one step give the same result, though their times differ.
    """
    counted = timed_alike(graph)
    blocks = blocks_of(counted)
    plans = [recompute_all(counted), square_root(counted)]
    plans.append(smallest(counted, blocks) or ())
    memory = Memory() if memory is None else memory
    for nest in (False, True):
        far = nested_reach(reach) if nest else reach
        partition = Partition(counted, places, reach=far, nest=nest, memory=memory)
        path = partition.best(partition.lowest())
        plans.append(segments_of(option for _, option in path or ()))
    plans = [
        tuple(
            without_idle_actions(counted, segment)
            for segment in within_runs(counted, plan)
        )
        for plan in plans
    ]

    def cost(plan: tuple[Segment, ...]) -> tuple[int, float]:
        costs = simulate(counted, plan)
        return costs.peak_bytes, costs.replay_seconds

    return min(plans, key=cost)


def nested_reach(reach: int) -> int:
    """Return the maximum number of places that a nested segment spans."""
    return max(2, reach // 2)


def timed_alike(graph: Graph) -> Graph:
    """Return the step with operators that all take one second.

    Examples:
        >>> from recoup.core.graph import Operation
        >>> graph = Graph((Operation("exp", 0.5, (), ()),), 0, (), (), (), (), (0,))
        >>> timed_alike(graph).operations[0].seconds
        1.0
    """
    return replace(
        graph,
        operations=tuple(replace(o, seconds=1.0) for o in graph.operations),
        step_seconds=float(len(graph.operations)),
        recording_seconds=0.0,
        link_bytes_per_second=0.0,
    )

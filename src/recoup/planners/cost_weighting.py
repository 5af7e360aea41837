"""Cost weighting: a graph with one time per operator, of the device and the host."""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

from recoup.core.graph import Graph
from recoup.core.segments import Action, Interval
from recoup.planners.baselines import blocks_of
from recoup.planners.interval_options import Memory
from recoup.planners.linear_program import OneLevel
from recoup.planners.partition import Partition, nested_reach
from recoup.planners.places import ends_of_runs, narrow_places

_EFFORT = 20_000
"""The number of operators, in intervals of two or three places, for the partition."""

_PLACES = 48

_LEANING = 0.02
"""The weight of recording where the host does not limit the step: among plans with
equal device time, the one that records less leaves more room for a slower host."""


class WeightedGraph:
    """A graph whose times are a weighted mean of device and host, and its planners.

    Planners sum the times of recording and recomputing. With an accelerator there are
    two sums, of which the larger counts, so planners minimise a mean of both. Bytes do
    not depend on the weight, so each plan is a plan of the step.

    Args:
        graph: One step.
        allow: Actions allowed on values besides recomputing them.
        host_weight: The weight of the host's time, from 0 to 1.
        memory: A cache of the costs of the step's intervals.
    """

    def __init__(
        self,
        graph: Graph,
        allow: frozenset[Action],
        *,
        host_weight: float,
        memory: Memory,
    ) -> None:
        self.graph = weighed(graph, host_weight)
        self.allow = allow
        self.memory = memory
        self._levels: dict[tuple[Interval, ...], OneLevel] = {}

    def level_of(self, intervals: Iterable[Interval]) -> OneLevel:
        """Return all plans over some intervals; cached."""
        key = tuple(intervals)
        level = self._levels.get(key)
        if level is None:
            level = self._levels[key] = OneLevel(self.graph, key, self.allow)
        return level

    @cached_property
    def reach(self) -> int:
        """The maximum number of places that a segment spans."""
        count = max(len(self.graph.operations), 1)
        return max(2, min(14, math.isqrt(_EFFORT // count)))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Boundaries where segments may begin and end."""
        graph = self.graph
        blocks = [place for interval in blocks_of(graph) for place in interval]
        always = blocks if 2 < len(graph.blocks) <= 2 * _PLACES else []
        return narrow_places(
            graph, most=_PLACES, always=[*always, *ends_of_runs(graph)]
        )

    @cached_property
    def partition(self) -> Partition:
        """All plans over the places."""
        return Partition(self.graph, self.places, reach=self.reach, memory=self.memory)

    @cached_property
    def nested_partition(self) -> Partition:
        """All plans over the places with segments inside others."""
        reach = nested_reach(self.reach)
        return Partition(
            self.graph, self.places, reach=reach, nest=True, memory=self.memory
        )


def weighed(graph: Graph, host_weight: float) -> Graph:
    """Return a graph whose times are a mean of the device's and the host's.

    Examples:
        >>> from recoup.core.graph import HostCosts, Operation
        >>> exp = Operation("exp", 4.0, (), ())
        >>> graph = Graph(
        ...     (exp,), 0, (), (), (), (), (0,), host_costs=HostCosts(9.0, 2, 1)
        ... )
        >>> weighted = weighed(graph, 0.5)
        >>> (
        ...     weighted.operations[0].seconds,
        ...     weighted.recording_seconds,
        ...     weighted.host_costs,
        ... )
        (2.5, 1.0, None)
        >>> weighed(graph, 0.0).operations == graph.operations
        True
    """
    host_costs = graph.host_costs
    if host_costs is None:
        return graph
    if not host_weight:
        leaning = graph.recording_seconds + _LEANING * host_costs.recording_seconds
        return replace(graph, recording_seconds=leaning, host_costs=None)
    device_weight = 1 - host_weight
    again = host_weight * host_costs.replaying_seconds
    return replace(
        graph,
        operations=tuple(
            replace(operation, seconds=device_weight * operation.seconds + again)
            for operation in graph.operations
        ),
        recording_seconds=host_weight * host_costs.recording_seconds,
        host_costs=None,
    )

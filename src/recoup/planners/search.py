"""The search for plans of one graph: cheap planners first, dearer where it pays."""

import math
from collections.abc import Iterable
from functools import cached_property

from recoup.core.calls import within_calls
from recoup.core.footprint import without_idle_actions
from recoup.core.graph import Graph
from recoup.core.segments import Action, Segment
from recoup.core.simulation import Simulation, simulate
from recoup.planners.blocks import blocks_of
from recoup.planners.bounds import bound_seconds
from recoup.planners.exhaustive import exhaustive
from recoup.planners.lowest import lowest_plan, nested_reach
from recoup.planners.one_level import OneLevel
from recoup.planners.options import Stretch, segments_of
from recoup.planners.partition import Partition, Path
from recoup.planners.places import ends_of_calls, narrow_places
from recoup.planners.refine import refine

Plan = tuple[tuple[Segment, ...], Simulation, str]

_CLOSE = 0.005
"""A plan this close to the bound, as a share of the step, is not searched further."""

_FAR = 0.1
"""A plan further from the bound than this is followed by nested ones: just above the
smallest budget for which no nesting is needed it may still pay."""

_EFFORT = 20_000
"""Operators in stretches of two or three places: what the partition may look at."""

_PLACES = 48
_TARGETS = 4


class Search:
    """Finds plans of one graph for any budget, and remembers them.

    Args:
        graph: One step.
        allow: What may be done with values besides recomputing them.
    """

    def __init__(self, graph: Graph, allow: frozenset[Action]) -> None:
        self.graph = graph
        self.allow = allow
        self.known: list[Plan] = [((), simulate(graph, ()), "store_all")]
        self._levels: dict[tuple[Stretch, ...], OneLevel] = {}

    def bound_seconds(self, budget_bytes: int) -> float:
        """Return what every plan within the budget adds to the step, at least."""
        offload = Action.OFFLOAD in self.allow
        return bound_seconds(self.graph, budget_bytes, may_offload=offload)

    def solve(self, budget_bytes: int, bound: float) -> Plan | None:
        """Return the fastest plan found within a budget; None: there is none."""
        if self.known[0][1].peak_bytes <= budget_bytes:
            return self.known[0]
        if not blocks_of(self.graph):
            return None
        self._try_everything(budget_bytes)
        if not self._is_close(budget_bytes, bound, share=_CLOSE):
            self._solve_blocks(budget_bytes)
        if not self._is_close(budget_bytes, bound, share=_CLOSE):
            self._solve_partition(self._partition, budget_bytes)
        if self.best(budget_bytes) is None:
            self.add(*self.floor)
            nests = self.best(budget_bytes) is not None
        else:
            nests = not self._is_close(budget_bytes, bound, share=_FAR)
        if nests:
            self._solve_partition(self._nested_partition, budget_bytes)
        self._refine(budget_bytes)
        return self.best(budget_bytes)

    def best(self, budget_bytes: int) -> Plan | None:
        """Return the fastest plan known within a budget."""
        fitting = [p for p in self.known if p[1].peak_bytes <= budget_bytes]
        return min(fitting, key=lambda p: (p[1].seconds, p[1].peak_bytes), default=None)

    def add(
        self, segments: Iterable[Segment], costs: Simulation | None, planner: str
    ) -> Simulation:
        """Remember a plan; return what it costs."""
        plan = within_calls(self.graph, tuple(segments))
        plan = tuple(without_idle_actions(self.graph, s) for s in plan)
        costs = costs or simulate(self.graph, plan)
        self.known.append((plan, costs, planner))
        return costs

    @cached_property
    def floor(self) -> Plan:
        """The plan with the lowest peak that is known how to find.

        It depends on bytes and operators alone, not on measured times: another
        measurement of the same step has the same one.
        """
        if not blocks_of(self.graph):
            return self.known[0]
        plan = lowest_plan(self.graph, self._places, reach=self._reach)
        return plan, simulate(self.graph, plan), "floor"

    def _is_close(self, budget_bytes: int, bound: float, *, share: float) -> bool:
        best = self.best(budget_bytes)
        if best is None:
            return False
        extra = best[1].seconds - self.graph.step_seconds
        return extra - bound <= share * self.graph.step_seconds

    @cached_property
    def _block_level(self) -> OneLevel:
        return OneLevel(self.graph, blocks_of(self.graph), self.allow)

    @cached_property
    def _reach(self) -> int:
        count = max(len(self.graph.operations), 1)
        return max(2, min(14, math.isqrt(_EFFORT // count)))

    @cached_property
    def _places(self) -> tuple[int, ...]:
        graph = self.graph
        blocks = [place for stretch in blocks_of(graph) for place in stretch]
        always = (
            blocks if 2 < len(graph.blocks) <= 2 * _PLACES else ends_of_calls(graph)
        )
        return narrow_places(graph, most=_PLACES, always=always)

    @cached_property
    def _partition(self) -> Partition:
        return Partition(self.graph, self._places, reach=self._reach)

    @cached_property
    def _nested_partition(self) -> Partition:
        reach = nested_reach(self._reach)
        return Partition(self.graph, self._places, reach=reach, nest=True)

    def _refine(self, budget_bytes: int) -> None:
        """Spend what room the best plan leaves."""
        best = self.best(budget_bytes)
        if best is None or Action.KEEP not in self.allow:
            return
        segments, costs, planner = best
        if costs.seconds > self.graph.step_seconds:
            self.add(refine(self.graph, segments, budget_bytes), None, planner)

    def _try_everything(self, budget_bytes: int) -> None:
        """Look at all plans over the blocks, if there are few."""
        if Action.KEEP in self.allow:
            found = exhaustive(self.graph, blocks_of(self.graph), budget_bytes)
            if found is not None:
                self.add(found, None, "exhaustive")

    def _solve_blocks(self, budget_bytes: int) -> None:
        found = self._block_level.solve(budget_bytes)
        if found is not None:
            self.add(segments_of(found.options), None, "blocks")

    def _solve_partition(self, partition: Partition, budget_bytes: int) -> None:
        """Cut forward anew, and settle what is held in the stretches."""
        paths: dict[float, Path] = {}
        target = budget_bytes
        for _ in range(_TARGETS):
            path = partition.best(target)
            if path is None:
                break
            costs = self.add(segments_of(o for _, o in path), None, "partition")
            room = budget_bytes - costs.peak_bytes
            paths[costs.seconds if room >= 0 else float("inf")] = path
            if 0 <= room <= budget_bytes // 500:
                break
            # The partition counts some bytes twice, so it may have more.
            target += room
        if not paths:
            return
        path = paths[min(paths)]
        stretches = tuple(stretch for stretch, _ in path)
        options = [option for _, option in path]
        level = self._levels.get(stretches)
        if level is None:
            level = self._levels[stretches] = OneLevel(
                self.graph, stretches, self.allow
            )
        level.offer(options)
        found = level.solve(budget_bytes)
        if found is not None:
            self.add(segments_of(found.options), None, "partition")

"""The search for plans of one graph: cheap planners first, costly ones if needed."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from time import perf_counter
from typing import NamedTuple

from recoup.core.graph import Graph
from recoup.core.segments import Action, Segment, within_runs
from recoup.core.simulation import Simulation, simulate
from recoup.core.trim_segments import is_idle, narrowed, without_idle_actions
from recoup.planners.baselines import blocks_of
from recoup.planners.bounds import bound_seconds
from recoup.planners.cost_weighting import WeightedGraph
from recoup.planners.exhaustive import exhaustive
from recoup.planners.interval_options import Memory, segments_of
from recoup.planners.partition import Partition, Path, lowest_plan
from recoup.planners.refine import refine
from recoup.planners.repeated_calls import repeat_calls


class FoundPlan(NamedTuple):
    """A plan of one pass, its cost, and the planner that found it."""

    segments: tuple[Segment, ...]
    costs: Simulation
    planner: str


_CLOSE = 0.005
"""A plan this close to the bound, as a share of the step, is not searched further."""

_NEARLY = 0.003
"""A rival plan that is slower by at most this share is filled too."""

_CLOSE_WITH_HOST = 0.03
"""The same for CPU-bound steps: less work for the device would not show."""

_FAR = 0.1
"""A plan further from the bound than this is followed by nested ones: they may pay just
above the smallest budget that needs no nesting."""

_TARGETS = 4

_REFINEMENTS = 8
"""The most refinements of a plan, as long as each makes it faster."""

_HOST_WEIGHTS = (0.1, 0.5)
"""The weights of the host's time for CPU-bound steps: enough to halve recording for
some tenths of a percent of device time; and enough for nearly the least host time."""

_HOST_MARGIN = 1.3
"""The factor by which a host may be slower than measured: with an H200, the host time
of one step varied by 15 to 30 %. A plan that would then be CPU-bound loses to one with
this margin."""


class Search:
    """Finds plans of one graph for any budget, and remembers them."""

    def __init__(self, graph: Graph, allow: frozenset[Action]) -> None:
        self.graph = graph
        self.allow = allow
        plain = FoundPlan((), simulate(graph, ()), "store_all")
        self.known: list[FoundPlan] = [plain]
        self.others = tuple(Search(other, allow) for other in graph.others)
        self._weighted_graphs: dict[float, WeightedGraph] = {}

    def bound_seconds(self, budget_bytes: int) -> float:
        """Return a lower bound of the time that any plan within the budget adds."""
        device = replace(self.graph, host_costs=None)
        offload = Action.OFFLOAD in self.allow
        added = bound_seconds(device, budget_bytes, may_offload=offload)
        if self.graph.host_costs is None:
            return added
        return max(0.0, added - self._idle_seconds)

    def solve(
        self, budget_bytes: int, bound: float, *, until: float | None = None
    ) -> FoundPlan | None:
        """Return the fastest plan found within a budget; None if there is none.

        Args:
            budget_bytes: The most bytes in use.
            bound: A lower bound of the time that a plan within the budget adds.
            until: The reading of `time.perf_counter` after which nothing costly begins
                once there is a plan.
        """
        if self.known[0].costs.peak_bytes <= budget_bytes:
            return self.known[0]
        if not blocks_of(self.graph):
            return None
        self._solve_for_device(budget_bytes, bound, until)
        if not self._is_late(until):
            self.solve_for_host(budget_bytes)
        self.solve_by_calls(budget_bytes)
        self._refine(budget_bytes, until)
        return self.best(budget_bytes)

    def solve_for_host(self, budget_bytes: int) -> FoundPlan | None:
        """Look for plans with less host time, where the step is CPU-bound.

        Returns the fastest plan known within the budget.
        """
        for weight in _HOST_WEIGHTS:
            if not self._waits_for_host(budget_bytes):
                break
            weighted = self._weighted(weight)
            self._solve_partition(weighted, weighted.partition, budget_bytes)
        return self.best(budget_bytes)

    def solve_by_calls(self, budget_bytes: int) -> FoundPlan | None:
        """Return a plan that repeats whole calls, where blocks may be called again."""
        found = repeat_calls(self.graph, budget_bytes) if self.graph.repeatable else ()
        if not found:
            return None
        self.add(found, "repeated calls")
        return self.known[-1]

    def with_times_of(self, graph: Graph) -> "Search":
        """Return a search for the same step with other times and the same plans.

        Host times may differ freely; device times by one factor, which changes no plan
        for the device alone.
        """
        other = Search(replace(graph, others=()), self.allow)
        other.graph = graph
        other.others = tuple(
            known.with_times_of(each)
            for known, each in zip(self.others, graph.others, strict=True)
        )
        if self.graph.host_costs is not None:
            other._weighted_graphs[0.0] = self._weighted(0.0)
        for segments, _, planner in self.known[1:]:
            costs = simulate(graph, segments)
            other.known.append(FoundPlan(segments, costs, planner))
        return other

    def best(self, budget_bytes: int) -> FoundPlan | None:
        """Return the fastest plan known within a budget."""
        fitting = self._fitting(budget_bytes)
        return min(
            fitting, key=lambda p: (_paced(p.costs), p.costs.peak_bytes), default=None
        )

    def add(self, segments: Iterable[Segment], planner: str) -> Simulation:
        """Remember a plan without its idle parts; return its cost."""
        plan, costs = self._tidied(segments)
        self.known.append(FoundPlan(plan, costs, planner))
        return costs

    @property
    def passes(self) -> tuple["Search", ...]:
        """The searches for all passes of the step, in the order of `Graph.passes`."""
        return (self, *self.others)

    @property
    def plain_bytes(self) -> int:
        """The peak of the plain step over all passes."""
        return max(each.known[0].costs.peak_bytes for each in self.passes)

    @property
    def plain_seconds(self) -> float:
        """The time of the plain step, all passes together."""
        return sum(each.known[0].costs.seconds for each in self.passes)

    @property
    def floor_bytes(self) -> int:
        """The minimum peak that the planners reach; defined here only."""
        return max(each.floor.costs.peak_bytes for each in self.passes)

    @cached_property
    def floor(self) -> FoundPlan:
        """The plan of this pass with the minimum peak that the planners find.

        It depends on bytes and operators alone, not on measured times: another
        measurement of the same step has the same one.
        """
        found = self._lowest()
        # If nothing can be dropped, regions only hold more.
        return min(found, self.known[0], key=lambda plan: plan.costs.peak_bytes)

    def _lowest(self) -> FoundPlan:
        if not blocks_of(self.graph):
            return self.known[0]
        weighted = self._weighted(0.0)
        plan = lowest_plan(
            self.graph, weighted.places, reach=weighted.reach, memory=weighted.memory
        )
        return FoundPlan(*self._tidied(plan), "floor")

    @property
    def _idle_seconds(self) -> float:
        """The idle time of the device in the plain step."""
        plain = self.known[0].costs
        return max(0.0, plain.host_seconds - plain.device_seconds)

    def _tidied(
        self, segments: Iterable[Segment]
    ) -> tuple[tuple[Segment, ...], Simulation]:
        """Return a plan without its idle parts, and its cost."""
        graph = self.graph
        plan = tuple(
            without_idle_actions(graph, segment)
            for segment in within_runs(graph, tuple(segments))
            if not is_idle(graph, segment)
        )
        costs = simulate(graph, plan)
        narrow = tuple(part for segment in plan for part in narrowed(graph, segment))
        if narrow != plan:
            narrow_costs = simulate(graph, narrow)
            if _is_no_worse(narrow_costs, costs):
                return narrow, narrow_costs
        return plan, costs

    def _fitting(self, budget_bytes: int) -> list[FoundPlan]:
        return [plan for plan in self.known if plan.costs.peak_bytes <= budget_bytes]

    def _weighted(self, host_weight: float) -> WeightedGraph:
        weighted = self._weighted_graphs.get(host_weight)
        if weighted is None:
            # Bytes do not depend on times: all weighted graphs share the intervals.
            memory = self._weighted(0.0).memory if host_weight else Memory()
            weighted = WeightedGraph(
                self.graph, self.allow, host_weight=host_weight, memory=memory
            )
            self._weighted_graphs[host_weight] = weighted
        return weighted

    def _solve_for_device(
        self, budget_bytes: int, bound: float, until: float | None
    ) -> None:
        """Look for the plan with the least device time."""
        weighted = self._weighted(0.0)
        self._try_everything(weighted, budget_bytes)
        if not self._is_close(budget_bytes, bound, share=_CLOSE):
            self._solve_blocks(weighted, budget_bytes)
        waits = self._waits_for_host(budget_bytes)
        close = _CLOSE_WITH_HOST if waits else _CLOSE
        if not self._is_done(budget_bytes, bound, until, share=close):
            self._solve_partition(weighted, weighted.partition, budget_bytes)
        if self.best(budget_bytes) is None:
            self.known.append(self.floor)
            nests = self.best(budget_bytes) is not None
        else:
            nests = not self._is_done(budget_bytes, bound, until, share=_FAR)
        if nests:
            self._solve_partition(weighted, weighted.nested_partition, budget_bytes)

    def _is_done(
        self, budget_bytes: int, bound: float, until: float | None, *, share: float
    ) -> bool:
        late = self._is_late(until) and self.best(budget_bytes) is not None
        return late or self._is_close(budget_bytes, bound, share=share)

    def _is_late(self, until: float | None) -> bool:
        return until is not None and perf_counter() >= until

    def _is_close(self, budget_bytes: int, bound: float, *, share: float) -> bool:
        """Return whether the device time of a known plan is close to the bound."""
        fitting = self._fitting(budget_bytes)
        if not fitting:
            return False
        added = min(p.costs.device_seconds for p in fitting) - self.graph.step_seconds
        needed = bound + self._idle_seconds if bound else 0.0
        return added - needed <= share * self.graph.step_seconds

    def _waits_for_host(self, budget_bytes: int) -> bool:
        """Return whether the best plan so far is CPU-bound."""
        best = self.best(budget_bytes)
        return best is not None and _paced(best.costs) > best.costs.device_seconds

    def _refine(self, budget_bytes: int, until: float | None) -> None:
        """Hold more in the best plan until nothing else fits, even after `until`."""
        if Action.KEEP not in self.allow:
            return
        graph = self._weighted(0.0).graph
        if not self._is_late(until):
            for segments, _, planner in self._rivals(budget_bytes):
                filled = refine(graph, segments, budget_bytes, swaps=False)
                self.add(filled, planner)
        for round_ in range(_REFINEMENTS):
            best = self.best(budget_bytes)
            if best is None or best.costs.seconds <= self.known[0].costs.seconds:
                return
            segments, costs, planner = best
            swaps = not round_ and not self._is_late(until)
            refined = refine(graph, segments, budget_bytes, swaps=swaps)
            # Narrower segments hold values for less time, which frees room again.
            if self.add(refined, planner).device_seconds >= costs.device_seconds:
                return

    def _rivals(self, budget_bytes: int) -> list[FoundPlan]:
        """Return plans of other planners that are nearly as fast as the best one.

        Their free room is elsewhere, so filling it may make one of them the best.
        """
        best = self.best(budget_bytes)
        if best is None:
            return []
        most = _paced(best.costs) + _NEARLY * self.graph.step_seconds
        found: dict[str, FoundPlan] = {}
        for plan in sorted(self._fitting(budget_bytes), key=lambda p: -_paced(p.costs)):
            found[plan.planner] = plan
        return [
            plan
            for planner, plan in found.items()
            if planner not in ("store_all", best.planner) and _paced(plan.costs) <= most
        ]

    def _try_everything(self, weighted: WeightedGraph, budget_bytes: int) -> None:
        """Try all plans over the blocks, if there are few."""
        if Action.KEEP in self.allow:
            found = exhaustive(weighted.graph, blocks_of(weighted.graph), budget_bytes)
            if found is not None:
                self.add(found, "exhaustive")

    def _solve_blocks(self, weighted: WeightedGraph, budget_bytes: int) -> None:
        """Choose the values to hold in each block: fast, good for repeated blocks."""
        found = weighted.level_of(blocks_of(weighted.graph)).solve(budget_bytes)
        if found is not None:
            self.add(segments_of(found), "blocks")

    def _solve_partition(
        self, weighted: WeightedGraph, partition: Partition, budget_bytes: int
    ) -> None:
        """Cut forward again, and choose the values to hold in the intervals."""
        paths: dict[float, Path] = {}
        target = budget_bytes
        for _ in range(_TARGETS):
            path = partition.best(target)
            if path is None:
                break
            costs = self.add(segments_of(o for _, o in path), "partition")
            room = budget_bytes - costs.peak_bytes
            paths[costs.device_seconds if room >= 0 else float("inf")] = path
            if 0 <= room <= budget_bytes // 500:
                break
            # The partition counts some bytes twice, so its target may be higher.
            target += room
        if not paths:
            return
        path = paths[min(paths)]
        level = weighted.level_of(interval for interval, _ in path)
        level.offer([option for _, option in path])
        found = level.solve(budget_bytes)
        if found is not None:
            self.add(segments_of(found), "partition")


def _is_no_worse(one: Simulation, other: Simulation) -> bool:
    """Return whether a plan takes no more bytes and no more time than another.

    Sums of times in another order may differ in their last digits.
    """
    same_seconds = other.seconds * (1 + 1e-9)
    return one.peak_bytes <= other.peak_bytes and one.seconds <= same_seconds


def _paced(costs: Simulation) -> float:
    """Return the time of a step with a host slower than measured."""
    return max(costs.device_seconds, _HOST_MARGIN * costs.host_seconds)

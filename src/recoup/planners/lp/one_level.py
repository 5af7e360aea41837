"""One level of segments: a stretch is kept whole, or replayed from what it holds."""

from collections.abc import Sequence

from recoup.core.graph import Graph
from recoup.core.memory_use import MemoryUse
from recoup.core.segments import Action, Stretch
from recoup.planners.cut.min_cut import Demand, demand_between, frontier_of
from recoup.planners.lp.linear_program import Programme
from recoup.planners.option import (
    Option,
    holding,
    keep_all,
    kept_around,
    with_actions,
)


class OneLevel:
    """All plans that cut forward into given stretches.

    Args:
        graph: The step.
        stretches: Pairs of boundaries, in order.
        allow: The actions besides recomputing.
        cuts: How many minimum cuts are computed at most for what a stretch may hold.
    """

    def __init__(
        self,
        graph: Graph,
        stretches: Sequence[Stretch],
        allow: frozenset[Action],
        *,
        cuts: int = 24,
    ) -> None:
        self.graph = graph
        self.stretches = tuple(stretches)
        self.allow = allow
        self.use = MemoryUse(graph, [kept_around(graph, self.stretches)])
        pure = [holding(graph, a, b, ()) for a, b in self.stretches]
        self.programme = Programme(graph, self.use, pure)
        self._offer_cuts(cuts)

    def offer(self, options: Sequence[Option]) -> None:
        """Add options found elsewhere, one for each stretch."""
        for number, option in enumerate(options):
            if option.segments:
                self.programme.offer(number, option)

    def solve(self, budget_bytes: int) -> list[Option] | None:
        """Return the fastest options found whose exact peak is within the budget."""
        relaxed = self.programme.relaxed(budget_bytes)
        numbers = relaxed and self.programme.rounded(budget_bytes, relaxed)
        return None if numbers is None else self.programme.chosen(numbers)

    def _offer_cuts(self, limit: int) -> None:
        """Offer to keep each stretch whole, and the cuts for all prices of a byte."""
        known: dict[object, list[tuple[int, ...]]] = {}
        for number, stretch in enumerate(self.stretches):
            demand = demand_between(self.graph, *stretch, self.programme.until)
            names, signature = _signature(demand)
            if signature not in known:
                places = {value: place for place, value in enumerate(names)}
                known[signature] = [
                    tuple(places[value] for value in choice.held)
                    for choice in reversed(frontier_of(demand, limit=limit))
                ]
            for held in known[signature]:
                self._offer_holding(number, [names[place] for place in held])
            if Action.KEEP in self.allow:
                self.programme.offer(number, keep_all(self.graph, *stretch))

    def _offer_holding(self, number: int, values: Sequence[int]) -> None:
        """Offer to hold some values of a stretch, on the device and on the host."""
        graph, stretch = self.graph, self.stretches[number]
        if Action.KEEP in self.allow or not values:
            self.programme.offer(number, holding(graph, *stretch, values))
        until, half = self.programme.until, self.use.half
        away = [v for v in values if until[graph.values[v].storage] < half]
        if away and self._may_offload:
            actions = dict.fromkeys(values, Action.KEEP)
            actions |= dict.fromkeys(away, Action.OFFLOAD)
            self.programme.offer(number, with_actions(graph, *stretch, actions))

    @property
    def _may_offload(self) -> bool:
        return Action.OFFLOAD in self.allow and self.graph.link_bytes_per_second > 0


def _signature(demand: Demand) -> tuple[list[int], object]:
    """Return the values of a stretch, and what tells it from others but its timing."""
    graph = demand.graph
    places: dict[int, int] = {}
    wiring: list[object] = []
    for number in demand.inside:
        operation = graph.operations[number]
        reads = [places.setdefault(v, len(places)) for v in operation.reads]
        makes = [places.setdefault(v, len(places)) for v in operation.makes]
        wiring.append((operation.name, operation.replayable, *reads, -1, *makes))
    values = list(places)
    sizes = [
        (demand.bytes_of(v), graph.values[v].holdable, demand.is_forced(v))
        for v in values
    ]
    needed = [places[v] for v in demand.values]
    return values, (tuple(wiring), tuple(sizes), tuple(needed))

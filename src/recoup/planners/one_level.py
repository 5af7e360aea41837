"""One level of segments: a stretch is kept whole, or replayed from what it holds."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recoup.core.graph import Graph
from recoup.core.memory_use import MemoryUse
from recoup.core.segments import Action
from recoup.core.simulation import stall_seconds
from recoup.planners.cut import Demand, choose, frontier_of
from recoup.planners.options import (
    Option,
    Stretch,
    footprints_of,
    holding,
    keep_all,
    kept_around,
    with_actions,
)
from recoup.planners.programme import Programme, Relaxation

_COLUMN_ROUNDS = 3
_ROUNDINGS = 5
_TRIALS = 32


@dataclass(frozen=True)
class Choice:
    """Options for all stretches, with what they come to.

    Attributes:
        options: One for each stretch.
        peak_bytes: The most bytes in use.
        seconds: What is run again and waited for.
    """

    options: tuple[Option, ...]
    peak_bytes: int
    seconds: float


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
        self._demands = [self._demand(stretch) for stretch in self.stretches]
        self._signatures = [_signature(demand) for demand in self._demands]
        self._offer_cuts(cuts)

    def offer(self, options: Sequence[Option]) -> None:
        """Add options found elsewhere, one for each stretch."""
        for number, option in enumerate(options):
            if option.segments:
                self.programme.offer(number, option)

    def floor(self) -> Choice:
        """Return the choice with the lowest peak among the simplest ones."""
        candidates = [
            [options[0] for options in self.programme.options],
            [options[1] for options in self.programme.options],
        ]
        return min(map(self._weigh, candidates), key=lambda c: c.peak_bytes)

    def solve(self, budget_bytes: int, *, nodes: int = 200) -> Choice | None:
        """Return the fastest choice found whose exact peak is within the budget."""
        relaxed = self.programme.relaxed(budget_bytes)
        for _ in range(_COLUMN_ROUNDS):
            if relaxed is None or not self._price(relaxed):
                break
            relaxed = self.programme.relaxed(budget_bytes)
        best = None if relaxed is None else self._rounded(relaxed, budget_bytes, nodes)
        if best is None:
            floor = self.floor()
            best = floor if floor.peak_bytes <= budget_bytes else None
        return best and self._improved(best, budget_bytes)

    def _rounded(
        self, relaxed: Relaxation, budget_bytes: int, nodes: int
    ) -> Choice | None:
        """Return whole options near a mixture whose exact peak is within the budget.

        Rows count storages that two stretches hold twice: what a choice has too much
        there is room for the next.
        """
        best = None
        numbers = None
        twice = np.zeros_like(self.programme.base)
        for _ in range(_ROUNDINGS):
            before = numbers
            numbers = self.programme.rounded(
                budget_bytes, relaxed, start=before, twice=twice, nodes=nodes
            )
            if numbers is None or numbers == before:
                break
            found = self._weigh(self.programme.chosen(numbers))
            room = budget_bytes - found.peak_bytes
            fits = room >= 0
            if fits and (best is None or found.seconds < best.seconds):
                best = found
            if (fits and room <= budget_bytes // 2000) or found.seconds == 0:
                break
            more = self.programme.counted_twice(numbers)
            twice = more if fits else np.minimum(twice, more)
        return best

    def _improved(self, choice: Choice, budget_bytes: int) -> Choice:
        """Return the choice with faster options where they still fit."""
        room = budget_bytes - self.programme.in_rows(choice.options)
        gains = [
            (gain, number, option)
            for number, now in enumerate(choice.options)
            for gain, option in self.programme.faster(number, now, room)
        ]
        for _, number, other in sorted(gains, key=lambda gain: -gain[0])[:_TRIALS]:
            if other.seconds >= choice.options[number].seconds:
                continue
            options = list(choice.options)
            options[number] = other
            found = self._weigh(options)
            if found.peak_bytes <= budget_bytes and found.seconds < choice.seconds:
                choice = found
        return choice

    def _weigh(self, options: Sequence[Option]) -> Choice:
        footprints = footprints_of(options)
        seconds = sum(option.seconds for option in options)
        seconds += stall_seconds(self.graph, self.use.host_bytes(footprints))
        return Choice(tuple(options), self.use.peak_bytes(footprints), seconds)

    def _demand(self, stretch: Stretch) -> Demand:
        """Return what backward needs of a stretch; what is there anyway is free."""
        graph = self.graph
        inside = graph.operations_between(*stretch)
        saved = [save.value for save in graph.saves_between(*stretch)]
        values = dict.fromkeys(v for v in saved if graph.values[v].producer in inside)
        free: dict[int, int] = {}
        for number in inside:
            operation = graph.operations[number]
            for value in (*operation.reads, *operation.makes):
                storage = graph.values[value].storage
                if (
                    graph.values[value].producer not in inside
                    or self.programme.until[storage] >= self.use.half
                ):
                    free[value] = 0
        return Demand(graph, inside, tuple(values), free)

    def _offer_cuts(self, limit: int) -> None:
        """Offer to keep each stretch whole, and the cuts for all prices of a byte."""
        known: dict[object, list[tuple[int, ...]]] = {}
        for number, (stretch, demand) in enumerate(
            zip(self.stretches, self._demands, strict=True)
        ):
            names, signature = self._signatures[number]
            if signature not in known:
                places = {value: place for place, value in enumerate(names)}
                known[signature] = [
                    tuple(places[value] for value in choice.held)
                    for choice in reversed(frontier_of(demand, limit=limit))
                ]
            for held in known[signature]:
                values = [names[place] for place in held]
                if Action.KEEP in self.allow or not values:
                    self.programme.offer(number, holding(self.graph, *stretch, values))
            if Action.KEEP in self.allow:
                self.programme.offer(number, keep_all(self.graph, *stretch))

    def _price(self, relaxed: Relaxation) -> bool:
        """Offer the options that are best at the prices of a mixture.

        Returns:
            Whether there was a new one that is cheaper than those known.
        """
        prices = _Prices(relaxed)
        new = False
        solved: dict[object, tuple[int, ...]] = {}
        second = self.graph.forward_seconds / 1e3
        for number, demand in enumerate(self._demands):
            actions = self._best_actions(demand, number, prices, solved)
            option = with_actions(self.graph, *self.stretches[number], actions)
            known = self.programme.least_cost(relaxed, number)
            tolerance = 1e-6 * (abs(known) + second)
            if self.programme.cost(relaxed, option) < known - tolerance:
                self.programme.offer(number, option)
                new = True
        return new

    def _best_actions(
        self,
        demand: Demand,
        number: int,
        prices: "_Prices",
        solved: dict[object, tuple[int, ...]],
    ) -> dict[int, Action]:
        """Return what to hold, and how, at the prices of bytes at moments.

        Stretches that look alike and have the same prices are solved once.
        """
        graph, half = self.graph, self.use.half
        until = self.programme.until
        made = [
            save
            for save in graph.saves_between(*self.stretches[number])
            if graph.values[save.value].producer in demand.inside
        ]
        end = max((save.released for save in made), default=half)
        used = {save.value: save.used for save in made}
        first = min(used.values(), default=half)

        def keeping(value: int) -> float:
            after = int(until[graph.values[value].storage]) + 1
            return graph.bytes_of(value) * prices.between(after, end)

        def offloading(value: int) -> float:
            storage = graph.values[value].storage
            if until[storage] >= half:
                return float("inf")
            back = max(used.get(value, first) - 1, half)
            device = prices.between(int(until[storage]) + 1, demand.inside.stop - 1)
            device += prices.between(back, end)
            return graph.bytes_of(value) * (device + prices.host)

        def price(value: int) -> float:
            if demand.is_forced(value):
                return 0.0
            ways = [keeping(value)] if Action.KEEP in self.allow else []
            ways += [offloading(value)] if self._may_offload else []
            return min(ways, default=float("inf"))

        penalty: dict[int, float] = {}
        for save in made:
            producer = graph.values[save.value].producer
            seconds = graph.bytes_of(save.value) * prices.between(
                save.used, save.released
            )
            penalty[producer] = penalty.get(producer, 0.0) + seconds
        names, signature = self._signatures[number]
        paid = tuple(f"{price(v):.9g}" for v in names)
        key = (signature, paid, tuple(f"{p:.9g}" for p in penalty.values()))
        if key not in solved:
            places = {value: place for place, value in enumerate(names)}
            chosen = choose(demand, price, penalty=penalty)
            solved[key] = tuple(places[value] for value in chosen)
        held = [names[place] for place in solved[key]]
        return {
            value: Action.OFFLOAD
            if self._may_offload and offloading(value) < keeping(value)
            else Action.KEEP
            for value in held
        }

    @property
    def _may_offload(self) -> bool:
        return Action.OFFLOAD in self.allow and self.graph.link_bytes_per_second > 0


class _Prices:
    """What a byte costs in a span of moments."""

    def __init__(self, relaxed: Relaxation) -> None:
        order = np.argsort(relaxed.rows)
        self.host = relaxed.host_price
        self._rows = relaxed.rows[order].tolist()
        self._sums = [0.0, *np.cumsum(relaxed.prices[order]).tolist()]

    def between(self, first: int, last: int) -> float:
        """Return what a byte costs from a first moment to a last."""
        if last < first:
            return 0.0
        low = bisect_left(self._rows, first)
        high = bisect_right(self._rows, last)
        return self._sums[high] - self._sums[low]


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

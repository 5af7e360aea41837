"""The linear program across intervals: one option for each, within the budget.

The bytes in use at a moment are a sum over the chosen options, except for storages that
two intervals hold. So the choice is a linear program with one row for each moment that
could be the peak; violated rows are added as they are found.

The LP relaxation has few intervals with more than one option. Each is rounded,
violations are repaired, and then options are exchanged, singly or in pairs, while that
is faster. Exchanges that the local search did not make are then forced on it one by
one, by reduced cost. The reduced cost of a column is the least that it adds to the
bound: columns that reach the best known cost are not tried. A general solver spends
most of its time on proving optimality, and usually finds the same options.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array

from recoup.core.graph import Floats, Graph, Integers
from recoup.core.memory_use import MemoryUse, Spans
from recoup.core.segments import Action, Interval
from recoup.planners.interval_options import (
    Option,
    footprints_of,
    holding,
    keep_all,
    kept_around,
    with_actions,
)
from recoup.planners.min_cut import Demand, demand_between, frontier_of

_KICKS = 48
"""The number of exchanges that are forced on the search."""

_COLUMNS = 160
"""The number of columns, by reduced cost, exchanged in pairs after one was forced."""

_CLOSE = 1e-3
"""The relative gap to the bound below which the search ends."""

_NOTHING = 1e-12
"""Rows are scaled by the budget: a violation below this is rounding."""


@dataclass(frozen=True)
class System:
    """Minimise objective . x where upper . x <= limits, ones . x = 1 and x >= 0.

    Attributes:
        objective: The costs of the columns.
        upper: Rows of inequalities.
        limits: Their right sides.
        ones: Rows of equalities.
    """

    objective: Floats
    upper: Floats
    limits: Floats
    ones: Floats


def mixture(system: System) -> tuple[Floats, float, Floats] | None:
    """Return the optimal x, its cost, and the dual of each upper row, or None."""
    found = cast(
        "Any",
        linprog(
            system.objective,
            A_ub=cast("Any", csr_array(system.upper)),
            b_ub=system.limits,
            A_eq=cast("Any", csr_array(system.ones)),
            b_eq=np.ones(len(system.ones)),
            method="highs",
        ),
    )
    if found.x is None:
        return None
    return found.x, float(found.fun), -found.ineqlin.marginals


@dataclass(frozen=True)
class Guide:
    """The LP relaxation's solution, as shares of whole options.

    Attributes:
        start: The column of each interval with the largest share.
        excess: The reduced cost of each column.
        bound_seconds: The value of the LP relaxation, a lower bound.
    """

    start: Integers
    excess: Floats
    bound_seconds: float


def near(system: System, guide: Guide) -> Integers | None:
    """Return a column for each interval, fast and within the limits.

    None if none was found, which does not prove that there is none.

    Args:
        system: The program; its last two columns are the seconds of waiting for copies
            out and in, and its last two rows define them.
        guide: The start, and the reduced costs.

    Costs some hundred passes over pairs of columns.

    Examples:
        Two intervals; both fast options do not fit together.

        >>> system = System(
        ...     objective=np.array([0.0, 3.0, 0.0, 2.0, 1.0, 1.0]),
        ...     upper=np.array(
        ...         [
        ...             [0.8, 0.1, 0.8, 0.1, 0.0, 0.0],
        ...             [0.0, 0.0, 0.0, 0.0, -1.0, 0.0],
        ...             [0.0, 0.0, 0.0, 0.0, 0.0, -1.0],
        ...         ]
        ...     ),
        ...     limits=np.array([1.0, 1.0, 2.0]),
        ...     ones=np.array([[1.0, 1, 0, 0, 0, 0], [0.0, 0, 1, 1, 0, 0]]),
        ... )
        >>> guide = Guide(np.array([1, 3]), np.zeros(4), 0.0)
        >>> near(system, guide).tolist()
        [0, 3]
    """
    swaps = Swaps(system)
    now = swaps.repaired(guide.start)
    if now is None:
        return None
    now = swaps.improved(now, swaps.others(None))
    cost = swaps.cost(now)
    order = np.argsort(guide.excess, kind="stable")
    tried = np.zeros(len(order), dtype=np.bool_)
    for _ in range(_KICKS):
        if cost - guide.bound_seconds <= _CLOSE * cost:
            break
        open_columns = guide.bound_seconds + guide.excess < cost
        worth = open_columns & ~tried
        worth[now] = False
        candidates = order[worth[order]]
        if not len(candidates):
            break
        forced = int(candidates[0])
        tried[forced] = True
        trial = swaps.repaired(swaps.with_column(now, forced), forced)
        if trial is None:
            continue
        free = open_columns & swaps.others(forced)
        free[order[_COLUMNS:]] = False
        trial = swaps.improved(trial, free)
        found = swaps.cost(trial)
        if found < cost:
            now, cost = trial, found
    return now


class Swaps:
    """The columns of a program, and exchanges of them."""

    def __init__(self, system: System) -> None:
        self.seconds = system.objective[:-2]
        self._use = system.upper[:-2, :-2]
        self._limits = system.limits[:-2] + _NOTHING
        self._copy = system.upper[-1, :-2]
        self._third = float(system.limits[-2])
        self._owner: Integers = system.ones[:, :-2].argmax(axis=0)
        self._least = 1e-9 * float(self.seconds.max(initial=0.0))

    def cost(self, now: Integers) -> float:
        """Return the seconds of a choice."""
        copied = self._copy[now].sum()
        return float(self.seconds[now].sum() + self._stall(copied))

    def with_column(self, now: Integers, column: int) -> Integers:
        """Return the choice with another column for one interval."""
        result = now.copy()
        result[self._owner[column]] = column
        return result

    def others(self, column: int | None) -> NDArray[np.bool_]:
        """Return the mask of columns of other intervals than a column's; None: all."""
        if column is None:
            return np.ones(len(self._owner), dtype=np.bool_)
        return self._owner != self._owner[column]

    def repaired(self, now: Integers, forced: int | None = None) -> Integers | None:
        """Return a choice within the limits near another one, or None."""
        free = self.others(forced)
        # Each exchange reduces the violation.
        while True:
            room = self._room(now)
            if bool((room >= 0).all()):
                return now
            change = self._use - self._use[:, now[self._owner]]
            broken = np.maximum(change - room[:, None], 0.0).sum(axis=0)
            mended = np.maximum(-room, 0.0).sum() - broken
            helps = free & (mended > _NOTHING)
            if not helps.any():
                return None
            added = self._added(now)
            enough = helps & (broken <= 0)
            if enough.any():
                column = np.where(enough, added, np.inf).argmin()
            else:
                share = np.maximum(added, 0.0) / np.where(helps, mended, 1.0)
                column = np.where(helps, share, np.inf).argmin()
            now = self.with_column(now, int(column))

    def improved(self, now: Integers, columns: NDArray[np.bool_]) -> Integers:
        """Return a feasible choice improved by exchanges of one or two options."""
        places = np.flatnonzero(columns)
        owner, use = self._owner[places], self._use[:, places]
        while len(places):
            change = use - self._use[:, now[owner]]
            room = self._room(now)
            first, second, gain = self._pairs(now, places)
            for row in np.argsort(room):
                fits = change[row][first] + change[row][second] <= room[row]
                first, second, gain = first[fits], second[fits], gain[fits]
            single = self._added(now)[places]
            alone = (single < -self._least) & (change <= room[:, None]).all(axis=0)
            single = np.where(alone, single, 0.0)
            best = int(single.argmin())
            if len(gain) and gain.min() < single[best]:
                pair = int(gain.argmin())
                now = self.with_column(now, int(places[first[pair]]))
                now = self.with_column(now, int(places[second[pair]]))
            elif alone[best]:
                now = self.with_column(now, int(places[best]))
            else:
                break
        return now

    def _pairs(
        self, now: Integers, places: Integers
    ) -> tuple[Integers, Integers, Floats]:
        """Return the exchanges of two options that save seconds, and the savings."""
        owner = self._owner[places]
        old = now[owner]
        added = self.seconds[places] - self.seconds[old]
        together = added[:, None] + added
        copied, change = self._copied(now, places, old)
        if copied or change.any():
            after = self._stall(copied + change[:, None] + change)
            together = together + after - self._stall(np.array(copied))
        worth = (together < -self._least) & (owner[:, None] < owner)
        first, second = np.nonzero(worth)
        return first, second, together[first, second]

    def _added(self, now: Integers) -> Floats:
        """Return the seconds that exchanging to each column adds."""
        old = now[self._owner]
        copied, change = self._copied(now, np.arange(len(old)), old)
        waited = self._stall(copied + change) - self._stall(np.array(copied))
        return self.seconds - self.seconds[old] + waited

    def _copied(
        self, now: Integers, places: Integers, old: Integers
    ) -> tuple[float, Floats]:
        return float(self._copy[now].sum()), self._copy[places] - self._copy[old]

    def _room(self, now: Integers) -> Floats:
        return self._limits - self._use[:, now].sum(axis=1)

    def _stall(self, copied: Floats) -> Floats:
        """Return the waiting time: beyond a third out, beyond two thirds back in."""
        beyond = np.maximum(copied - self._third, 0.0)
        return beyond + np.maximum(copied - 2 * self._third, 0.0)


_WINDOWS = 64
_FIRST_WINDOWS = 16
_ROUNDS = 12


@dataclass(frozen=True)
class Relaxation:
    """The solution of the LP relaxation: a mixture of options.

    Attributes:
        seconds: Its cost.
        shares: The share of each option, interval by interval.
        prices: Seconds for one more byte at each watched moment.
        host_price: Seconds for one more byte copied to the host.
    """

    seconds: float
    shares: tuple[Floats, ...]
    prices: Floats
    host_price: float


class Programme:
    """A choice of one option for each of several disjoint intervals.

    Args:
        graph: The step.
        use: The memory of the step, including values held outside the intervals.
        floor: For each interval the option that holds least, as a start.
    """

    def __init__(self, graph: Graph, use: MemoryUse, floor: Sequence[Option]) -> None:
        self.graph = graph
        self.use = use
        self.options: list[list[Option]] = [[option] for option in floor]
        self.until = _held_from_outside(use, floor)
        self.base = _bytes_without(use, self.until)
        self._rows = np.zeros(0, dtype=np.int64)
        self._spans: list[list[Spans]] = [
            [use.added(option.footprint, self.until)] for option in floor
        ]
        self._uses: list[list[Floats]] = [[np.zeros(0)] for _ in floor]
        self.watch(_peaks(use.bytes_at(footprints_of(floor)), _FIRST_WINDOWS))

    def offer(self, interval: int, option: Option) -> None:
        """Add an option."""
        spans = self.use.added(option.footprint, self.until)
        self.options[interval].append(option)
        self._spans[interval].append(spans)
        self._uses[interval].append(spans.at(self._rows))

    def watch(self, moments: Integers) -> None:
        """Add rows."""
        new = np.setdiff1d(moments, self._rows)
        self._rows = np.concatenate([self._rows, new])
        for known, uses in zip(self._spans, self._uses, strict=True):
            for number, spans in enumerate(known):
                uses[number] = np.concatenate([uses[number], spans.at(new)])

    def relaxed(self, budget_bytes: int) -> Relaxation | None:
        """Return the optimum of the relaxation; None if nothing fits."""
        found = None
        for _ in range(_ROUNDS):
            found = self._solve_mixture(budget_bytes)
            if found is None or not self._watch_broken(found.shares, budget_bytes):
                break
        return found

    def rounded(self, budget_bytes: int, relaxed: Relaxation) -> list[int] | None:
        """Return whole options near a mixture that fit, or None.

        Rows count storages that two intervals hold twice: the exact peak is no higher.
        """
        first = np.cumsum([0, *(len(options) for options in self.options)])[:-1]
        now = first + np.array([int(share.argmax()) for share in relaxed.shares])
        for _ in range(_ROUNDS):
            system = self._system(budget_bytes)
            excess = self._excess(system, budget_bytes, relaxed)
            found = near(system, Guide(now, excess, relaxed.seconds))
            if found is None:
                return None
            now = found
            x = np.zeros(len(system.objective))
            x[found] = 1.0
            if not self._watch_broken(self._by_interval(x), budget_bytes):
                return [int(number) for number in found - first]
        return None

    def _excess(self, system: System, budget_bytes: int, relaxed: Relaxation) -> Floats:
        """Return the reduced cost of each column relative to its interval's best."""
        prices = relaxed.prices * max(budget_bytes, 1)
        cost = system.objective[:-2] + prices @ system.upper[: len(prices), :-2]
        copy_price = relaxed.host_price * self.graph.link_bytes_per_second
        cost += copy_price * system.upper[-1, :-2]
        return np.concatenate([c - c.min() for c in self._by_interval(cost)])

    def chosen(self, numbers: Sequence[int]) -> list[Option]:
        """Return the options of a choice."""
        return [o[n] for o, n in zip(self.options, numbers, strict=True)]

    def _watch_broken(self, shares: Sequence[Floats], budget_bytes: int) -> bool:
        """Add rows where a mixture does not fit; return whether there are any."""
        total = self.base.astype(np.float64)
        for known, share in zip(self._spans, shares, strict=True):
            for number in np.flatnonzero(share > 1e-9):
                total += share[number] * known[number].at_all(self.graph.moments)
        total[self._rows] = 0
        tops = _peaks(total, _WINDOWS)
        broken = tops[total[tops] > budget_bytes * (1 + 1e-9)]
        if len(broken):
            self.watch(broken)
        return len(broken) > 0

    def _system(self, budget_bytes: int) -> System:
        """Return the program as arrays.

        The last two columns are the seconds of waiting for copies out and in. Bytes are
        in units of the budget, to suit the solver's tolerances.
        """
        every = [option for options in self.options for option in options]
        unit = float(max(budget_bytes, 1))
        rows = np.array([use for uses in self._uses for use in uses]).T / unit
        limits = (budget_bytes - self.base[self._rows]) / unit
        link = self.graph.link_bytes_per_second
        host = np.array([self._host_bytes(option) for option in every])
        copy = host / link if link else np.zeros(len(every))
        waits = np.zeros((len(rows) + 2, 2))
        waits[-2, 0] = waits[-1, 1] = -1.0
        third = self.graph.step_seconds / 3
        owners = np.repeat(
            np.arange(len(self.options)), [len(options) for options in self.options]
        )
        ones = np.zeros((len(self.options), len(every) + 2))
        ones[owners, np.arange(len(every))] = 1.0
        return System(
            objective=np.array([*(option.seconds for option in every), 1.0, 1.0]),
            upper=np.hstack([np.vstack([rows, copy, copy]), waits]),
            limits=np.concatenate([limits, [third, 2 * third]]),
            ones=ones,
        )

    def _host_bytes(self, option: Option) -> int:
        half = self.use.half
        storages = {o.storage for o in option.footprint.offloads}
        return sum(
            self.graph.storages[s].bytes for s in storages if self.until[s] < half
        )

    def _solve_mixture(self, budget_bytes: int) -> Relaxation | None:
        found = mixture(self._system(budget_bytes))
        if found is None:
            return None
        x, seconds, prices = found
        link = self.graph.link_bytes_per_second
        return Relaxation(
            seconds,
            self._by_interval(x),
            prices[:-2] / max(budget_bytes, 1),
            float(prices[-2:].sum()) / link if link else 0.0,
        )

    def _by_interval(self, x: Floats) -> tuple[Floats, ...]:
        cuts = np.cumsum([len(options) for options in self.options])[:-1]
        return tuple(np.split(x[: sum(map(len, self.options))], cuts))


def _held_from_outside(use: MemoryUse, floor: Sequence[Option]) -> Integers:
    """Return the last moments of storages, with those that intervals hold."""
    graph = use.graph
    until = use.until.copy()
    for option in floor:
        if not option.segments:
            continue
        inside = graph.operations_between(
            option.segments[0].start, option.segments[-1].stop
        )
        for storage, last in option.footprint.holds.items():
            if graph.storages[storage].born not in inside:
                until[storage] = max(int(until[storage]), last)
    return until


def _bytes_without(use: MemoryUse, until: Integers) -> Integers:
    bare = MemoryUse(use.graph)
    bare.until = until
    return bare.bytes_at([])


def _peaks(total: Integers | Floats, windows: int) -> Integers:
    """Return the largest moment of each of some windows of the step."""
    edges = np.unique(np.linspace(0, len(total), windows + 1).astype(np.int64))
    return np.array(
        [a + int(total[a:b].argmax()) for a, b in itertools.pairwise(edges)],
        dtype=np.int64,
    )


class OneLevel:
    """All plans that cut forward into given intervals."""

    def __init__(
        self,
        graph: Graph,
        intervals: Sequence[Interval],
        allow: frozenset[Action],
    ) -> None:
        self.graph = graph
        self.intervals = tuple(intervals)
        self.allow = allow
        self.use = MemoryUse(graph, [kept_around(graph, self.intervals)])
        pure = [holding(graph, a, b, ()) for a, b in self.intervals]
        self.programme = Programme(graph, self.use, pure)
        self._offer_cuts()

    def offer(self, options: Sequence[Option]) -> None:
        """Add options found elsewhere, one for each interval."""
        for number, option in enumerate(options):
            if option.segments:
                self.programme.offer(number, option)

    def solve(self, budget_bytes: int) -> list[Option] | None:
        """Return the fastest options found whose exact peak is within the budget."""
        relaxed = self.programme.relaxed(budget_bytes)
        numbers = relaxed and self.programme.rounded(budget_bytes, relaxed)
        return None if numbers is None else self.programme.chosen(numbers)

    def _offer_cuts(self) -> None:
        """Offer to keep each interval whole, and the cuts for all prices of a byte."""
        known: dict[object, list[tuple[int, ...]]] = {}
        for number, interval in enumerate(self.intervals):
            demand = demand_between(self.graph, *interval, self.programme.until)
            names, signature = _signature(demand)
            if signature not in known:
                places = {value: place for place, value in enumerate(names)}
                known[signature] = [
                    tuple(places[value] for value in choice.held)
                    for choice in reversed(frontier_of(demand))
                ]
            for held in known[signature]:
                self._offer_holding(number, [names[place] for place in held])
            if Action.KEEP in self.allow:
                self.programme.offer(number, keep_all(self.graph, *interval))

    def _offer_holding(self, number: int, values: Sequence[int]) -> None:
        """Offer to hold some values of an interval, on the device and on the host."""
        graph, interval = self.graph, self.intervals[number]
        if Action.KEEP in self.allow or not values:
            self.programme.offer(number, holding(graph, *interval, values))
        until, half = self.programme.until, self.use.half
        away = [v for v in values if until[graph.values[v].storage] < half]
        if away and self._may_offload:
            actions = dict.fromkeys(values, Action.KEEP)
            actions |= dict.fromkeys(away, Action.OFFLOAD)
            self.programme.offer(number, with_actions(graph, *interval, actions))

    @property
    def _may_offload(self) -> bool:
        return Action.OFFLOAD in self.allow and self.graph.link_bytes_per_second > 0


def _signature(demand: Demand) -> tuple[list[int], object]:
    """Return the values of an interval, and its signature without timings."""
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

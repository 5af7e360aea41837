"""The programme across stretches: one option for each, as fast as the budget allows.

The bytes in use at a moment are, but for storages that two stretches hold, a sum over
the options chosen. So the choice is a linear programme with one row for each moment
that could be the peak; rows are added as they are broken. Its prices, the duals, say
which options are worth trying when the mixture is rounded to whole ones, which are then
checked as the simulator counts.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recoup.core.graph import Floats, Graph, Integers
from recoup.core.memory_use import MemoryUse, Spans
from recoup.planners.lp.highs import System, mixture
from recoup.planners.lp.rounding import Guide, near
from recoup.planners.option import Option, footprints_of

_WINDOWS = 64
_FIRST_WINDOWS = 16
_ROUNDS = 12


@dataclass(frozen=True)
class Relaxation:
    """The best mixture of options.

    Attributes:
        seconds: What it costs.
        shares: How much of each option, stretch by stretch.
        rows: The moments that were watched.
        prices: Seconds for one more byte at each of them.
        host_price: Seconds for one more byte copied to the host.
    """

    seconds: float
    shares: tuple[Floats, ...]
    rows: Integers
    prices: Floats
    host_price: float


class Programme:
    """A choice of one option for each of several disjoint stretches.

    Args:
        graph: The step.
        use: The memory of the step, with what is held outside of the stretches.
        floor: For each stretch the option that holds least, as a start.
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

    def offer(self, stretch: int, option: Option) -> None:
        """Add an option."""
        spans = self.use.added(option.footprint, self.until)
        self.options[stretch].append(option)
        self._spans[stretch].append(spans)
        self._uses[stretch].append(spans.at(self._rows))

    def watch(self, moments: Integers) -> None:
        """Add rows."""
        new = np.setdiff1d(moments, self._rows)
        self._rows = np.concatenate([self._rows, new])
        for known, uses in zip(self._spans, self._uses, strict=True):
            for number, spans in enumerate(known):
                uses[number] = np.concatenate([uses[number], spans.at(new)])

    def relaxed(self, budget_bytes: int) -> Relaxation | None:
        """Return the best mixture that fits; None: there is none."""
        found = None
        for _ in range(_ROUNDS):
            found = self._solve_mixture(budget_bytes)
            if found is None or not self._watch_broken(found.shares, budget_bytes):
                break
        return found

    def rounded(self, budget_bytes: int, relaxed: Relaxation) -> list[int] | None:
        """Return whole options near a mixture that fit, or None.

        Rows count storages that two stretches hold twice: the exact peak is no higher.
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
            if not self._watch_broken(self._by_stretch(x), budget_bytes):
                return [int(number) for number in found - first]
        return None

    def _excess(self, system: System, budget_bytes: int, relaxed: Relaxation) -> Floats:
        """Return what columns cost beyond the best of their stretch, at the prices."""
        prices = relaxed.prices * max(budget_bytes, 1)
        cost = system.objective[:-2] + prices @ system.upper[: len(prices), :-2]
        copy_price = relaxed.host_price * self.graph.link_bytes_per_second
        cost += copy_price * system.upper[-1, :-2]
        return np.concatenate([c - c.min() for c in self._by_stretch(cost)])

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
        """Return the programme as numbers.

        The last two columns are the seconds that copies out and in are waited for.
        Bytes are counted in budgets, for the sake of the solver's tolerances.
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
            self._by_stretch(x),
            self._rows.copy(),
            prices[:-2] / max(budget_bytes, 1),
            float(prices[-2:].sum()) / link if link else 0.0,
        )

    def _by_stretch(self, x: Floats) -> tuple[Floats, ...]:
        cuts = np.cumsum([len(options) for options in self.options])[:-1]
        return tuple(np.split(x[: sum(map(len, self.options))], cuts))


def _held_from_outside(use: MemoryUse, floor: Sequence[Option]) -> Integers:
    """Return until when storages are held that a stretch takes from elsewhere."""
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

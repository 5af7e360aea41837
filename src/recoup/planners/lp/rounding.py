"""Whole options near a mixture: swaps of one or two at a time, while it fits.

The mixture of a linear programme has few stretches with more than one option. Each is
rounded, what does not fit is repaired, and then options are exchanged, alone or two
together, as long as that is faster. Exchanges that the search did not take by itself
are forced on it one by one, those that the prices of the mixture like best first. What
a column costs at these prices beyond the best of its stretch is what it adds to the
bound, at least: columns that reach what is known already are not looked at.

A general solver spends most of its time on the proof that nothing is better, and most
often finds the same options.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recoup.core.graph import Floats, Integers
from recoup.planners.lp.highs import System

_KICKS = 48
"""Exchanges that are forced on the search."""

_COLUMNS = 160
"""Columns that are exchanged in pairs after one was forced: the best at the prices."""

_CLOSE = 1e-3
"""A share of the seconds: what is this close to the bound is not searched further."""

_NOTHING = 1e-12
"""Rows are in budgets: a violation below this is rounding."""


@dataclass(frozen=True)
class Guide:
    """What the mixture says about whole options.

    Attributes:
        start: The column of each stretch with the largest share.
        excess: What each column costs beyond the best of its stretch, at the prices.
        bound_seconds: What the mixture costs: nothing is faster.
    """

    start: Integers
    excess: Floats
    bound_seconds: float


def near(system: System, guide: Guide) -> Integers | None:
    """Return a column for each stretch, fast and within the limits.

    None: none was found, which does not mean that there is none.

    Args:
        system: The programme; its last two columns are the seconds that are waited for
            copies out and in, and its last two rows say so.
        guide: Where to start, and what is worth trying.

    Costs some hundred passes over pairs of columns.

    Examples:
        Two stretches; both fast options do not fit together.

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
    """The columns of a programme, and exchanges of them."""

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
        """Return the choice with another column for one stretch."""
        result = now.copy()
        result[self._owner[column]] = column
        return result

    def others(self, column: int | None) -> NDArray[np.bool_]:
        """Return which columns are of other stretches than one is; None: all."""
        if column is None:
            return np.ones(len(self._owner), dtype=np.bool_)
        return self._owner != self._owner[column]

    def repaired(self, now: Integers, forced: int | None = None) -> Integers | None:
        """Return a choice within the limits near another one, or None.

        Args:
            now: What may break the limits.
            forced: A column that stays.
        """
        free = self.others(forced)
        # Each exchange breaks the limits by less.
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
        """Return what exchanges of one or two options make of a choice that fits.

        Args:
            now: A choice within the limits.
            columns: Those to exchange others for.
        """
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
        """Return exchanges of two at a time that save seconds, and how many."""
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
        """Return what taking each column instead adds to the seconds."""
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
        """Return what is waited for: beyond a third out, beyond two thirds back in."""
        beyond = np.maximum(copied - self._third, 0.0)
        return beyond + np.maximum(copied - 2 * self._third, 0.0)

"""Statistics of regions: their calls, replays and kept bytes.

A region adds to the accounts of its scope or group, its node, and its observers, such
as managers and profilers. The accounts outlive the region.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from recoup.core.display import table
from recoup.core.units import print_bytes

if TYPE_CHECKING:
    from recoup.engine.recording.observers import Watched


class Account:
    """Sums over regions, with the fields of `Statistics`.

    Counts are class attributes until they differ from zero.
    """

    calls = 0
    replays = 0
    replayed_operators = 0
    replay_seconds = 0.0
    kept_bytes = 0
    freed_bytes = 0
    recomputed_bytes = 0


class NamedAccount(Account):
    """The account of all regions of one name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def snapshot(self) -> "Statistics":
        """Return the current counts."""
        counts = {each.name: getattr(self, each.name) for each in fields(Statistics)}
        return Statistics(**counts)

    def reset(self) -> None:
        """Reset all counts to zero."""
        self.__dict__ = {"name": self.name}


@dataclass(frozen=True, slots=True)
class Statistics:
    """The statistics of the regions of one name.

    Attributes:
        name: The name of the regions.
        calls: The number of regions that ran.
        replays: The number of replays, one per region and backward.
        replayed_operators: The number of operators that replays ran.
        replay_seconds: The host time of the replays.
        kept_bytes: The activations that they held from forward to backward, and the
            states of random generators, without parameters.
        freed_bytes: The bytes of their results that autograd would have saved but that
            they did not hold.
        recomputed_bytes: The bytes that replays returned to autograd.

    Examples:
        >>> print(Statistics("block", calls=2, replays=1, freed_bytes=2048))
        region  calls  replays  operators  seconds  kept  freed  recomputed
        block       2        1          0   0.0000   0 B  2 KiB         0 B
    """

    name: str
    calls: int = 0
    replays: int = 0
    replayed_operators: int = 0
    replay_seconds: float = 0.0
    kept_bytes: int = 0
    freed_bytes: int = 0
    recomputed_bytes: int = 0

    def __str__(self) -> str:
        return str(StatisticsTable((self,)))


_COLUMNS: dict[str, Callable[[Statistics], str]] = {
    "region": lambda each: each.name,
    "calls": lambda each: str(each.calls),
    "replays": lambda each: str(each.replays),
    "operators": lambda each: str(each.replayed_operators),
    "seconds": lambda each: f"{each.replay_seconds:.4f}",
    "kept": lambda each: print_bytes(each.kept_bytes),
    "freed": lambda each: print_bytes(each.freed_bytes),
    "recomputed": lambda each: print_bytes(each.recomputed_bytes),
}


class StatisticsTable:
    """Statistics by name, printable with `print` or, in color, with rich.

    Examples:
        >>> table = StatisticsTable([Statistics("a", calls=1), Statistics("b")])
        >>> len(table), table["a"].calls, table.total.calls
        (2, 1, 1)
    """

    def __init__(self, rows: Iterable[Statistics]) -> None:
        self.rows = tuple(rows)

    def __iter__(self) -> Iterator[Statistics]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> Statistics:
        for row in self.rows:
            if row.name == name:
                return row
        known = ", ".join(repr(row.name) for row in self.rows) or "none"
        raise KeyError(
            f"expected the name of a region that ran ({known}), got {name!r}"
        )

    @property
    def total(self) -> Statistics:
        """The sum of all rows."""
        counts = [each.name for each in fields(Statistics) if each.name != "name"]
        sums = {name: sum(getattr(row, name) for row in self.rows) for name in counts}
        return Statistics("total", **sums)

    def _cells(self) -> list[list[str]]:
        shown = list(self.rows)
        if len(shown) > 1:
            shown.append(self.total)
        return [[show(row) for show in _COLUMNS.values()] for row in shown]

    def __str__(self) -> str:
        return table(list(_COLUMNS), self._cells(), ruled=False)

    def __rich__(self) -> Any:
        """Return the table for rich."""
        from rich.table import Table

        found = Table()
        for name in _COLUMNS:
            found.add_column(name, justify="left" if name == "region" else "right")
        for cells in self._cells():
            found.add_row(*cells)
        return found


class Accounts:
    """Accounts by name, created on demand, and the regions that add to them.

    Regions are not kept alive. A copy only has the counts.
    """

    def __init__(self) -> None:
        self._named: dict[str, NamedAccount] = {}
        self._numbers = itertools.count()
        self._regions: WeakValueDictionary[int, Watched] = WeakValueDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {"_named": self._named}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()
        self._named = state["_named"]

    @property
    def regions(self) -> "list[Watched]":
        """The living regions, oldest first."""
        return list(self._regions.values())

    def named(self, name: str) -> NamedAccount:
        """Return the account of a name."""
        account = self._named.get(name)
        if account is None:
            account = self._named.setdefault(name, NamedAccount(name))
        return account

    def follow(self, region: "Watched") -> None:
        """Add the account of its name to a region that begins."""
        self._regions[next(self._numbers)] = region
        account = self.named(region.name)
        if account not in region.accounts:
            region.accounts = (*region.accounts, account)

    def forget_regions(self) -> None:
        """Stop tracking the regions so far; their counts stay."""
        self._regions = WeakValueDictionary()

    def table(self) -> StatisticsTable:
        """Return all current counts."""
        for region in self.regions:
            region.count_bytes()
        return StatisticsTable(each.snapshot() for each in self._named.values())

    def reset(self) -> None:
        """Reset all counts to zero."""
        self._named = {}

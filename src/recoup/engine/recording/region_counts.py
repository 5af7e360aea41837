"""Counts: what a region adds to the accounts of its scope and of those who watch."""

from collections.abc import Container, Iterable
from weakref import ref

from recoup.engine.lifetime.values import (
    Hold,
    Layout,
    TapeValue,
    activation_bytes,
    bytes_of,
)
from recoup.engine.recording.tape import Tape
from recoup.engine.scopes.statistics import Account


class Counted:
    """A region that counts its replays, and the bytes that it keeps and recomputes.

    Attributes:
        replays: How many times it has been replayed.
        replayed_operators: How many operators that ran in all.
        accounts: What it adds its counts to.
        own_accounts: Likewise, those of its scope and node, as long as these live:
            nobody can read them afterwards, and a backward does not wait for that.
    """

    # Of the class: they are set where they differ.
    replays = 0
    replayed_operators = 0
    accounts: tuple[Account, ...] = ()
    own_accounts: "tuple[ref[Account], ...]" = ()
    _is_counted = False
    tape: Tape

    def holds(self) -> list[Hold]:
        """Return everything that is held for backward and for replays."""
        raise NotImplementedError

    def random_bytes(self) -> int:
        """Return the bytes of the generator states kept for random operators."""
        kept = [operation.random for operation in self.tape.operations]
        return sum([random[1].nbytes for random in kept if random is not None])

    def count_bytes(self) -> None:
        """Add to the accounts what it keeps and frees, once.

        It is done when somebody asks, or in backward: recording takes no longer.
        """
        if self._is_counted:
            return
        self._is_counted = True
        if self.own_accounts:
            self._find_own_accounts()
        freed = bytes_of(
            [v for v in self.tape.saved if v.demand > 0 and v.hold is None]
        )
        kept = activation_bytes(self.holds()) + self.random_bytes()
        for account in self.accounts:
            account.freed_bytes += freed
            account.kept_bytes += kept

    def _find_own_accounts(self) -> None:
        for known in self.own_accounts:
            account = known()
            if account is not None:
                self.accounts += (account,)
        self.own_accounts = ()

    def count_replay(self) -> None:
        """Count a backward that makes it replay."""
        self.replays += 1
        if self.own_accounts:
            self._find_own_accounts()
        if self.accounts:
            self.count_bytes()
            for account in self.accounts:
                account.replays += 1

    def count_run(
        self,
        operators: int,
        wanted: Iterable[TapeValue],
        known: Container[TapeValue | Layout],
        seconds: float,
    ) -> None:
        """Count the run of a program."""
        made = bytes_of(
            [
                value
                for value in wanted
                if value.demand > 0 and value.hold is None and value not in known
            ]
        )
        for account in self.accounts:
            account.replayed_operators += operators
            account.replay_seconds += seconds
            account.recomputed_bytes += made

"""A region's counts, which it adds to the accounts of its scope and observers."""

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
        replays: The number of replays.
        replayed_operators: The number of operators run by all replays.
        accounts: The accounts to which it adds its counts.
        own_accounts: Weak references to the accounts of its scope and node, which
            nobody can read after these died.
    """

    # Class attributes: set on the instance only where they differ.
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
        """Add the kept and freed bytes to the accounts, once.

        Done on request or in backward, so as not to slow down recording.
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
        """Count a backward that replays the region."""
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

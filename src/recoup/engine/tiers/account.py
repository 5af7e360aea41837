"""Accounts: the bytes in each tier, and the traffic to and from it."""

import threading
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """The bytes in a tier, and its traffic so far in this process.

    Attributes:
        live_bytes: Bytes in the tier now.
        peak_bytes: The most bytes in it at once.
        out_bytes: Bytes moved there in total.
        back_bytes: Bytes moved back in total.
    """

    live_bytes: int = 0
    peak_bytes: int = 0
    out_bytes: int = 0
    back_bytes: int = 0


class TierAccount:
    """Counts the bytes of one tier.

    Examples:
        >>> account = TierAccount()
        >>> account.put(10)
        >>> account.got(10)
        >>> account.dropped(10)
        >>> account.usage
        Usage(live_bytes=0, peak_bytes=10, out_bytes=10, back_bytes=10)
    """

    def __init__(self) -> None:
        self._live_bytes = 0
        self._peak_bytes = 0
        self._out_bytes = 0
        self._back_bytes = 0
        # Finalizers must not wait for a lock that their own thread may hold: they
        # append here, and readers of the counts add up.
        self._dropped: deque[int] = deque()
        self._lock = threading.Lock()

    @property
    def usage(self) -> Usage:
        """The current counts."""
        with self._lock:
            self._add_up()
            return Usage(
                self._live_bytes, self._peak_bytes, self._out_bytes, self._back_bytes
            )

    def put(self, nbytes: int) -> None:
        """Count a storage that was put in."""
        with self._lock:
            self._add_up()
            self._live_bytes += nbytes
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)
            self._out_bytes += nbytes

    def got(self, nbytes: int) -> None:
        """Count a storage that was brought back."""
        with self._lock:
            self._back_bytes += nbytes

    def dropped(self, nbytes: int) -> None:
        """Count a storage that was dropped; finalizers may call this at any point."""
        self._dropped.append(nbytes)

    def _add_up(self) -> None:
        while self._dropped:
            self._live_bytes -= self._dropped.popleft()


@dataclass(frozen=True, slots=True)
class TierAccounts:
    """The accounts of the tiers off the device."""

    host: TierAccount
    disk: TierAccount


ACCOUNTS = TierAccounts(host=TierAccount(), disk=TierAccount())


def tier_usage() -> dict[str, Usage]:
    """Return the usage of the host and disk tiers in this process.

    Examples:
        >>> sorted(tier_usage())
        ['disk', 'host']
    """
    return {"host": ACCOUNTS.host.usage, "disk": ACCOUNTS.disk.usage}

"""The log of verified regions, so that each is verified once."""

import threading
from collections.abc import Hashable, Iterable
from weakref import finalize

_TRIES = 4


class Ledger:
    """Records which regions have been verified, so that each is verified once.

    A region that runs other operators than were verified is due again, until those are
    verified. Operators that do not recur are given up: after a few verifications of
    others the region counts as verified. The same holds for parts of a region that no
    backward needs.

    A region that failed is verified until a few backwards in a row have passed. One is
    not enough: if two runs of a region alternate and one is wrong, the other passes
    after each failure. Runs from before the failure do not count.
    """

    def __init__(self) -> None:
        self._done: dict[Hashable, set[int]] = {}
        self._due: dict[Hashable, dict[int, int]] = {}
        self._failures: dict[Hashable, tuple[int, int]] = {}
        self._parts: dict[Hashable, int] = {}
        self._moment = 0
        self._followed: set[Hashable] = set()
        # Reentrant: garbage collection may finalize a module and call `forget`.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._done)

    @property
    def moment(self) -> int:
        """The number of failures so far; a check records it at its start."""
        return self._moment

    def needs(self, key: Hashable) -> bool:
        """Return whether the region must be verified at its next run."""
        return key not in self._done or key in self._due

    def done(self, key: Hashable, signature: int) -> None:
        """Record that these operators need no verification."""
        with self._lock:
            if key not in self._failures:
                self._add(key, signature)

    def passed(
        self,
        key: Hashable,
        signatures: Iterable[int],
        since: int,
        *,
        is_whole: bool = True,
    ) -> None:
        """Record that all runs of a region in a backward passed.

        Args:
            key: The identity of the region.
            signatures: The signatures of those runs.
            since: The moment of the first of them.
            is_whole: Whether they were compared completely.
        """
        with self._lock:
            moment, left = self._failures.get(key, (0, 1))
            if since < moment:
                return
            if not is_whole:
                tries = self._parts.get(key, _TRIES)
                if tries > 1:
                    self._parts[key] = tries - 1
                    return
            self._parts.pop(key, None)
            if left > 1:
                self._failures[key] = (moment, left - 1)
                return
            self._failures.pop(key, None)
            for signature in signatures:
                self._add(key, signature)

    def failed(self, key: Hashable) -> None:
        """Record that a region failed, discarding earlier results."""
        with self._lock:
            self._moment += 1
            self._failures[key] = (self._moment, _TRIES)
            self._done.pop(key, None)
            self._due.pop(key, None)

    def ran(self, key: Hashable, signature: int) -> None:
        """Record that a region ran unverified; other operators make it due again."""
        known = self._done.get(key)
        if known is None or signature in known:
            return  # an unknown region is due anyway
        with self._lock:
            self._due.setdefault(key, {})[signature] = _TRIES

    def forget(self, key: Hashable) -> None:
        """Forget a dead region."""
        with self._lock:
            for known in (self._done, self._due, self._failures, self._parts):
                known.pop(key, None)
            self._followed.discard(key)

    def forget_with(self, owner: object, key: Hashable) -> None:
        """Forget a region when its owner dies."""
        with self._lock:
            if key not in self._followed:
                self._followed.add(key)
                finalize(owner, self.forget, key).atexit = False

    def _add(self, key: Hashable, signature: int) -> None:
        self._done.setdefault(key, set()).add(signature)
        waiting = self._due.pop(key, None)
        if waiting is not None:
            waiting.pop(signature, None)
            left = {each: tries - 1 for each, tries in waiting.items() if tries > 1}
            if left:
                self._due[key] = left


LEDGER = Ledger()

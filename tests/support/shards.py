"""Many cases run in several processes; one that ends a process costs only itself.

A case is named by a key that can be pickled. A process may also stop on its own account
after any case, for example because the case has left something behind: another one goes
on with the cases that remain.
"""

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any


@dataclass
class Tally:
    """The outcome of many cases.

    Attributes:
        kinds: How many cases there were of each kind of verdict.
        failures: The description of each that failed, by its key.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    failures: dict[Any, str] = field(default_factory=dict)

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.kinds.items()))
        failed = ", ".join(map(str, self.failures)) or "none"
        return f"{self.kinds.total()} cases: {kinds}; failed: {failed}"

    def add(self, other: "Tally") -> None:
        """Add the outcome of other cases."""
        self.kinds += other.kinds
        self.failures |= other.failures


Work = Callable[[Iterator[Any], Tally], None]
"""Takes cases one by one, and adds one verdict on each to a tally.

It runs in the other process, so it is a function of a module or a partial of one.
"""


class _Shard:
    """Some of the cases, and the process that runs them.

    The process says which case it begins, with its tally so far: a case that ends the
    process is known by that.
    """

    def __init__(
        self, work: Work, cases: Sequence[Any], deadline: float, hang: float
    ) -> None:
        self._work = work
        self._rest = cases
        self._deadline = deadline
        self._hang = hang
        self._ended = Tally()
        self._start()

    @property
    def tally(self) -> Tally:
        """What came of the cases so far."""
        found = Tally()
        found.add(self._ended)
        found.add(self._running)
        return found

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.messages, end = context.Pipe(duplex=False)
        work = self._work, self._rest, self._deadline, end
        self._process = context.Process(target=_run, args=work)
        self._process.start()
        end.close()
        self._begun: int | None = None
        self._next = 0
        self._running = Tally()
        self._heard = time.time()

    def receive(self) -> bool:
        """Take one message; return False after the last, with no case left to begin."""
        try:
            self._next, begins, self._running = self.messages.recv()
        except EOFError:
            return self._end("crashed")
        self._begun = self._next if begins else None
        self._heard = time.time()
        return True

    def look(self) -> bool:
        """End a process whose case does not end; return False if none is to follow."""
        if self._begun is None or time.time() < self._heard + self._hang:
            return True
        self._process.kill()
        return self._end("hanging")

    def stop(self) -> None:
        """End the process, long after the time is over."""
        if self._process.is_alive():
            self._process.kill()
            self._end("hanging")

    def _end(self, kind: str) -> bool:
        self._process.join()
        self.messages.close()
        if self._begun is not None:
            case = self._rest[self._begun]
            end = f"the process ended with {self._process.exitcode}"
            why = end if kind == "crashed" else "does not end"
            self._running.kinds[kind] += 1
            self._running.failures[case] = f"{case}: {why}"
            self._next = self._begun + 1
        self._rest = self._rest[self._next :]
        self._ended, self._running = self.tally, Tally()
        self._begun = None
        is_stuck = not self._next  # it ended before its first case
        if not self._rest or is_stuck or time.time() > self._deadline:
            return False
        self._start()
        return True


def _run(
    work: Work, cases: Sequence[Any], deadline: float, messages: Connection
) -> None:
    tally = Tally()

    def begun() -> Iterator[Any]:
        for position, case in enumerate(cases):
            if time.time() > deadline:
                break
            messages.send((position, True, tally))
            yield case

    work(begun(), tally)
    messages.send((tally.kinds.total(), False, tally))
    messages.close()
    os._exit(0)  # what torch does at the end is none of the cases' business


_GRACE_SECONDS = 120
"""So long a case that was begun in time may take."""


def run_in_shards(
    work: Work,
    cases: Sequence[Any],
    processes: int,
    *,
    seconds: float,
    hang: float = _GRACE_SECONDS,
    report: Callable[[str], None] = lambda _: None,
) -> Tally:
    """Run cases in several processes; return what came of all.

    Args:
        work: Runs them.
        cases: Their keys. Each process takes every n-th.
        processes: How many run at a time.
        seconds: No case begins later than that.
        hang: A case that takes longer, in seconds, has failed.
        report: Called with each failure as it is found, and each minute with a tally.
    """
    deadline = time.time() + seconds
    parts = [cases[n::processes] for n in range(processes)]
    shards = [_Shard(work, part, deadline, hang) for part in parts if part]
    running = list(shards)
    told: set[Any] = set()
    spoken = time.time()
    while running and time.time() < deadline + _GRACE_SECONDS:
        ready = set(wait([shard.messages for shard in running], timeout=5))
        running = [
            shard
            for shard in running
            if (shard.receive() if shard.messages in ready else shard.look())
        ]
        total = _total(shards)
        for key in total.failures.keys() - told:
            told.add(key)
            report(total.failures[key])
        if time.time() > spoken + 60:
            spoken = time.time()
            report(str(total))
    for shard in running:
        shard.stop()
    return _total(shards)


def _total(shards: Iterable[_Shard]) -> Tally:
    total = Tally()
    for shard in shards:
        total.add(shard.tally)
    return total

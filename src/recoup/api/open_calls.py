"""Calls of models whose backward is still to come, in order."""

import itertools
import threading
import weakref
from collections.abc import Sequence

from recoup.api.managed import Managed
from recoup.backend.trees import tensors

_ROWS = 8
"""So many different rows of calls are remembered: the last ones."""

Row = tuple[Managed, ...]


class _OfThread(threading.local):
    """What one thread has open.

    Attributes:
        calls: The calls whose memory is in use, by number.
        running: The number of the call of each model that has not returned.
        count: How many calls were open after the last one had begun.
    """

    def __init__(self) -> None:
        self.calls: dict[int, Managed] = {}
        self.running: dict[Managed, int] = {}
        self.count = 0


class _Mark:
    """Hangs on the graph of a call, and closes it when backward arrives."""

    def __init__(self, calls: dict[int, Managed], number: int) -> None:
        self._calls, self._number = calls, number
        # A graph that is dropped has let go of everything as well.
        weakref.finalize(self, calls.pop, number, None).atexit = False

    def __call__(self, *gradients: object) -> None:
        del gradients
        self._calls.pop(self._number, None)


class OpenCalls:
    """Knows which models' memory is in use at the same time.

    Attributes:
        rows: What was open together, in the order of the calls; no row is the
            beginning of another one.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._numbers = itertools.count()
        self._mine = _OfThread()

    @property
    def now(self) -> Row:
        """What is open on this thread."""
        return tuple(self._mine.calls.values())

    def is_step_begun(self) -> bool:
        """Return whether backward has been there since the last call."""
        return not self._mine.calls or len(self._mine.calls) < self._mine.count

    def begin(self, managed: Managed) -> bool:
        """Take note of a call; say whether it makes a row that was not known."""
        mine = self._mine
        interrupted = mine.running.pop(managed, None)
        if interrupted is not None:
            mine.calls.pop(interrupted, None)
        number = next(self._numbers)
        mine.calls[number] = managed
        mine.running[managed] = number
        mine.count = len(mine.calls)
        return self._note(self.now)

    def end(self, managed: Managed, output: object) -> None:
        """Wait for the backward of a call that returned this."""
        number = self._mine.running.pop(managed, None)
        if number is None:
            return
        calls = self._mine.calls
        nodes = [t.grad_fn for t in tensors(output) if t.grad_fn is not None]
        mark = _Mark(calls, number)
        for node in nodes:
            node.register_hook(mark)

    def forget(self, managed: Managed) -> None:
        """Forget the rows that a model is in."""
        self.rows = [row for row in self.rows if managed not in row]

    def _note(self, row: Row) -> bool:
        if any(_begins(known, row) for known in self.rows):
            return False
        others = [known for known in self.rows if not _begins(row, known)]
        self.rows = [*others, row][-_ROWS:]
        return True


def _begins(row: Sequence[Managed], beginning: Sequence[Managed]) -> bool:
    return row[: len(beginning)] == beginning

"""One call of `fit`: its interrupts, its progress bar, and batches in groups."""

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from types import FrameType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from recoup.train.run_results import StepOutcome, StepResult

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Turns the first interrupt in the block into a request.

    A second Ctrl-C raises `KeyboardInterrupt`. Handlers are installed in the main
    thread only, the one that gets signals, and restored at the end.

    Examples:
        >>> with Interruption() as interruption:
        ...     signal.raise_signal(signal.SIGINT)
        ...     interruption.is_requested
        True
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for each in _SIGNALS:
                self._before[each] = signal.signal(each, self._request)
        return self

    def __exit__(self, *error: Any) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before = {}

    def _request(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.is_requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.is_requested = True


_SECONDS_BETWEEN_READS = 0.5


class ProgressBar:
    """Shows epoch, steps, loss and skipped steps on standard error.

    The device is read at most twice a second: reading makes the host wait for it.

    Args:
        enabled: False shows nothing.
        console: The console to use instead of standard error.
    """

    def __init__(self, *, enabled: bool, console: Console | None = None) -> None:
        self._progress: Progress | None = None
        if enabled:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[facts]}"),
                console=console or Console(stderr=True),
            )
            self._task = self._progress.add_task("", total=None, facts="")
        self._skipped = 0
        self._uncounted: list[StepOutcome] = []
        self._read_at = -_SECONDS_BETWEEN_READS

    def begin_epoch(self, number: int, *, steps: int | None, done: int) -> None:
        """Start counting the steps of an epoch, some of which may be done."""
        if self._progress is not None:
            self._progress.reset(
                self._task, total=steps, completed=done, description=f"epoch {number}"
            )

    def advance(self, result: StepResult) -> None:
        """Count a step."""
        if self._progress is None:
            return
        self._uncounted.append(result.outcome)
        self._progress.advance(self._task)
        now = time.monotonic()
        if now - self._read_at >= _SECONDS_BETWEEN_READS:
            self._read_at = now
            self._skipped += sum(outcome.skipped for outcome in self._uncounted)
            self._uncounted = []
            facts = f"loss {result.loss:.4g}"
            if self._skipped:
                facts += f", {self._skipped} skipped"
            if result.scale is not None:
                facts += f", scale {result.scale:g}"
            self._progress.update(self._task, facts=facts)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._progress is not None:
            self._progress.stop()


class FitCall:
    """The state of one call of `fit`."""

    def __init__(self, on_step: Callable[[StepResult], object] | None) -> None:
        self.interruption = Interruption()
        self.bar = ProgressBar(enabled=False)
        self.last: StepResult | None = None
        self.is_unwritten = False
        self.is_stopped = False
        self._on_step = on_step

    @property
    def is_ending(self) -> bool:
        """Whether a signal or `Trainer.stop` requested the end after this step."""
        return self.is_stopped or self.interruption.is_requested

    def take(self, result: StepResult) -> None:
        """Record a step and call `on_step` with its result."""
        self.last = result
        self.is_unwritten = True
        self.bar.advance(result)
        if self._on_step is not None:
            self._on_step(result)


def groups(batches: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of batches, the last one shorter, and then an empty one."""
    while group := list(itertools.islice(batches, size)):
        yield group
    yield []


def step_count(loader: Iterable[Any], size: int) -> int | None:
    """Return the number of steps of an epoch, if the loader has a length."""
    if not isinstance(loader, Sized):
        return None
    try:
        return -(-len(loader) // size)
    except TypeError:  # a loader has a length if its dataset has one
        return None

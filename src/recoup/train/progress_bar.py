"""A progress bar that does not make the device wait."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from recoup.train.outcome import Outcome
from recoup.train.run_results import StepResult

_SECONDS_BETWEEN_READS = 0.5


class ProgressBar:
    """Shows epoch, steps, loss and skipped steps on standard error.

    The device is asked for numbers at most twice a second: asking makes the host wait
    for it.

    Args:
        enabled: False shows nothing.
        console: Where to show it, instead of standard error.
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
        self._uncounted: list[Outcome] = []
        self._read_at = -_SECONDS_BETWEEN_READS

    def begin_epoch(self, number: int, *, steps: int | None, done: int) -> None:
        """Start counting the steps of an epoch, of which some are done already."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

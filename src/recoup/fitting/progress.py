"""Progress of long work: a callback, or a line in the terminal."""

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from recoup.core.units import print_seconds

Progress = Callable[[str], None]
"""Progress callback with the current activity."""

Show = Callable[[str, int, int], None]
"""Progress callback with the current activity, the amount done, and the total."""


class Course:
    """The progress of work that consists of running a step several times."""

    def __init__(self, runs: int, show: Show | None = None) -> None:
        self._show = show
        self._runs = runs
        self._done = 0
        self._doing = ""
        self._started = time.perf_counter()

    def __call__(self, doing: str) -> None:
        """Record the current activity."""
        self._doing = doing
        self._tell()

    def counting(self, run: Callable[[], object]) -> Callable[[], object]:
        """Return a step whose runs are counted."""

        def counted() -> object:
            result = run()
            self._done += 1
            # Corrections of the plan run the step more often than expected.
            self._runs = max(self._runs, self._done + 1)
            self._tell()
            return result

        return counted

    def _tell(self) -> None:
        if self._show is not None:
            self._show(self._doing, self._done, self._runs)

    @property
    def seconds_left(self) -> float | None:
        """The estimated remaining time, or None before the first run."""
        if not self._done:
            return None
        spent = time.perf_counter() - self._started
        return spent / self._done * (self._runs - self._done)


@contextmanager
def progress_for(
    progress: Progress | bool | None,  # noqa: FBT001 (as users give it)
    *,
    runs: int,
) -> Generator[Course]:
    """Yield a `Course` that reports to the progress callback.

    Args:
        progress: A progress callback; True shows a line in the terminal, False
            shows nothing, None shows it if standard error is a terminal.
        runs: The expected number of step runs.
    """
    if callable(progress):
        yield _reporting(progress, runs)
        return
    shown = sys.stderr.isatty() if progress is None else progress
    if not shown:
        yield Course(runs)
        return
    with bar("recoup: starting", runs) as show:
        yield Course(
            runs, lambda doing, done, total: show(f"recoup: {doing}", done, total)
        )


@contextmanager
def bar(doing: str, total: int | None = None) -> Generator[Show]:
    """Show a progress bar in the terminal; yield the function that updates it."""
    with Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bars:
        task = bars.add_task(doing, total=total)

        def show(doing: str, done: int, total: int) -> None:
            bars.update(task, description=doing, completed=done, total=total)

        yield show


def _reporting(progress: Progress, runs: int) -> Course:
    """Return a course that calls `progress` once per activity."""
    before = ""

    def show(doing: str, done: int, total: int) -> None:
        del done, total
        nonlocal before
        if doing == before:
            return
        before = doing
        left = course.seconds_left
        words = "" if left is None else f", about {print_seconds(left)} left"
        progress(f"{doing}{words}")

    course = Course(runs, show)
    return course

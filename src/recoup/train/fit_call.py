"""One call of `fit`: what it carries along, and batches in groups."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

from recoup.train.progress_bar import ProgressBar
from recoup.train.run_results import StepResult
from recoup.train.signals import Interruption


class Run:
    """What one call of `fit` carries along."""

    def __init__(self, on_step: Callable[[StepResult], object] | None) -> None:
        self.interruption = Interruption()
        self.bar = ProgressBar(enabled=False)
        self.last: StepResult | None = None
        self.is_unwritten = False
        self.is_stopped = False
        self._on_step = on_step

    @property
    def is_ending(self) -> bool:
        """Whether a signal or `Trainer.stop` asked to end after this step."""
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
    """Return how many steps an epoch has, if the loader knows its length."""
    if not isinstance(loader, Sized):
        return None
    try:
        return -(-len(loader) // size)
    except TypeError:  # a loader has a length if its dataset has one
        return None

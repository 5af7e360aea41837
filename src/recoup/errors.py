"""Every error that recoup raises on purpose, under one base class, and its warning.

Each message says what was asked, what was found and what to do.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = [
    "BudgetWarning",
    "CaptureError",
    "ChangedTensorError",
    "CheckpointIndexError",
    "CheckpointLimitError",
    "ClearedError",
    "InfeasibleError",
    "MismatchError",
    "MissingCheckpointError",
    "PeerError",
    "PlanError",
    "RecoupError",
    "ReplayError",
    "ScheduleError",
    "SnapshotError",
    "SnapshotWriteError",
    "TierError",
    "UnsupportedError",
    "UsageError",
]


class RecoupError(Exception):
    """Catch this to catch everything that recoup raises on purpose.

    Examples:
        >>> try:
        ...     raise UsageError("expected a name for the scope, got ''.")
        ... except RecoupError as error:
        ...     print(error)
        expected a name for the scope, got ''.
    """


class UsageError(RecoupError, ValueError):
    """An argument or an order of calls that cannot be carried out.

    Nothing has happened yet when this is raised: correct the call and repeat it.
    """


class ReplayError(RecoupError, RuntimeError):
    """A region could not be recomputed in backward as it was recorded.

    The subclasses say why. No gradient has been computed from a wrong value.
    """


class ChangedTensorError(ReplayError):
    """A tensor from outside the region was written to before backward needed it."""


class MismatchError(ReplayError):
    """A recomputed value is not the value that forward produced."""


class ClearedError(ReplayError):
    """What the region needs for its replay has been freed already.

    It is raised by a second backward without `retain_graph=True`, and by a
    backward after the saved activations were cleared.
    """


class CaptureError(ReplayError):
    """A function to recompute no longer sees the variables it saw.

    The usual case is a `lambda` in a loop that refers to the loop variable: by
    the time of backward the variable has moved on.
    """


class UnsupportedError(RecoupError, RuntimeError):
    """PyTorch can do this, recoup cannot carry it through a region.

    It is raised in place of an answer that might be wrong.
    """


class ScheduleError(RecoupError, ValueError):
    """A loop schedule that cannot be carried out, or does not reverse the loop."""


class PlanError(RecoupError, ValueError):
    """A plan cannot be read, or does not belong to the model it is applied to."""


class InfeasibleError(RecoupError, RuntimeError):
    """No plan fits into the budget.

    Attributes:
        budget_bytes: What was asked for.
        floor_bytes: The smallest budget that can be met.
        reason: Why no less will do, in words; part of the message.
        moment: Where the peak of the smallest plan is, among the step's moments.
        holders: What is in use there: a description and its bytes, largest first.
        advice: What else to do; part of the message.
        page: Makes the report page about the smallest plan; None: not known here.
    """

    def __init__(  # noqa: PLR0913 (all by keyword)
        self,
        message: str,
        *,
        advice: str = "",
        budget_bytes: int = 0,
        floor_bytes: int = 0,
        reason: str = "",
        moment: int = 0,
        holders: tuple[tuple[str, int], ...] = (),
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        self.reason = reason
        self.moment = moment
        self.holders = holders
        self.advice = advice
        self.page: Callable[[], str] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # What makes the page has the model in it, which stays in its process.
        return type(self), self.args, {**self.__dict__, "page": None}

    def write_page(self, path: str | Path) -> Path:
        """Write the report page about the smallest plan: where the memory goes.

        Raises:
            UsageError: The error does not come from `recoup.fit`.
        """
        if self.page is None:
            raise UsageError(
                "expected an error of recoup.fit to write a page about, got one "
                "without a measured step; call recoup.fit."
            )
        target = Path(path)
        target.write_text(self.page(), encoding="utf-8")
        return target


class TierError(RecoupError, RuntimeError):
    """A value cannot be put in its tier, or not be brought back from it.

    The disk is full, say, or a file of ours was damaged. No gradient has been computed
    from a wrong value.
    """


class SnapshotError(RecoupError, RuntimeError):
    """A file with the state of a training run cannot be read, or does not fit.

    Nothing has been changed when this is raised.
    """


class SnapshotWriteError(SnapshotError):
    """A snapshot could not be written: the disk is full, say, or the folder is gone.

    The snapshot before it is unchanged, and so is the run.
    """


class PeerError(RecoupError, RuntimeError):
    """Another process of the same training run has failed.

    It is raised so that this process does not wait for it; what happened is written
    where that process ran.
    """


class CheckpointLimitError(RecoupError, ValueError):
    """More checkpoints are to be kept than are allowed."""


class CheckpointIndexError(RecoupError, IndexError):
    """A layer is asked for whose index is beyond all that were saved.

    Attributes:
        index: The index.
        limit: The first index that is too high.
        context: Who was asked.

    Examples:
        >>> str(CheckpointIndexError(5, 3, context="get"))
        'Index 5 out of bounds (limit 3) in get'
    """

    def __init__(self, index: int, limit: int, *, context: str) -> None:
        super().__init__(f"Index {index} out of bounds (limit {limit}) in {context}")
        self.index = index
        self.limit = limit
        self.context = context


class MissingCheckpointError(RecoupError, KeyError):
    """A layer is asked for of which no checkpoint is kept."""

    def __str__(self) -> str:
        """Return the message; a KeyError would show it in quotes."""
        return Exception.__str__(self)


class BudgetWarning(RecoupError, UserWarning):  # noqa: N818 (it is a warning)
    """A step that is trained is not the one that was measured, or cannot fit.

    Gradients are right all the same; the peak may exceed the budget. A filter that
    raises warnings makes it an error, which `RecoupError` catches as all others.

    Attributes:
        needed_bytes: What the step needs, as predicted; 0: that cannot be predicted.
        budget_bytes: The budget.

    Examples:
        >>> BudgetWarning("too large", needed_bytes=3, budget_bytes=2).needed_bytes
        3
    """

    def __init__(
        self, message: str, *, needed_bytes: int = 0, budget_bytes: int = 0
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes

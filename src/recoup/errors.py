"""All errors that recoup raises on purpose, under one base class, and its warning.

Each message gives the expectation, the finding and the remedy.
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
    """The base class of everything that recoup raises on purpose.

    Examples:
        >>> try:
        ...     raise UsageError("expected a name for the scope, got ''.")
        ... except RecoupError as error:
        ...     print(error)
        expected a name for the scope, got ''.
    """


class UsageError(RecoupError, ValueError):
    """An invalid argument or order of calls.

    Nothing has happened yet when this is raised: correct the call and repeat it.
    """


class ReplayError(RecoupError, RuntimeError):
    """A region could not be recomputed in backward as it was recorded.

    The subclasses give the reason. No gradient has been computed from a wrong value.
    """


class ChangedTensorError(ReplayError):
    """A tensor from outside the region was written to before backward needed it."""


class MismatchError(ReplayError):
    """A recomputed value differs from the value that forward produced."""


class ClearedError(ReplayError):
    """Values that the region needs for its replay have already been freed.

    It is raised by a second backward without `retain_graph=True`, and by a backward
    after the saved activations were cleared.
    """


class CaptureError(ReplayError):
    """A function to recompute no longer sees the same variables.

    The usual case is a `lambda` in a loop that refers to the loop variable, which has
    changed by the time of backward.
    """


class UnsupportedError(RecoupError, RuntimeError):
    """PyTorch supports this, recoup does not support it in a region.

    It is raised instead of computing a result that might be wrong.
    """


class ScheduleError(RecoupError, ValueError):
    """A loop schedule that cannot be carried out, or does not reverse the loop."""


class PlanError(RecoupError, ValueError):
    """A plan cannot be read, or does not belong to the model it is applied to."""


class InfeasibleError(RecoupError, RuntimeError):
    """No plan fits into the budget.

    Attributes:
        budget_bytes: The requested budget.
        floor_bytes: The smallest budget that can be met.
        reason: Why no smaller one can, in words; part of the message.
        moment: The peak of the smallest plan, as one of the step's moments.
        holders: Descriptions and bytes of memory in use there, largest first.
        advice: Further advice; part of the message.
        page: Makes the report page about the smallest plan; None: not available.
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
        # The page refers to the model, which stays in its process.
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
    """A value cannot be stored in its tier, or not be fetched from it.

    For example, the disk is full, or a file was damaged. No gradient has been computed
    from a wrong value.
    """


class SnapshotError(RecoupError, RuntimeError):
    """A file with the state of a training run cannot be read, or does not fit.

    Nothing has been changed when this is raised.
    """


class SnapshotWriteError(SnapshotError):
    """A snapshot could not be written: for example, the disk is full.

    The previous snapshot is unchanged, and so is the run.
    """


class PeerError(RecoupError, RuntimeError):
    """Another process of the same training run has failed.

    It is raised so that this process does not wait for it; the cause is in the output
    of that process.
    """


class CheckpointLimitError(RecoupError, ValueError):
    """More checkpoints would be kept than allowed."""


class CheckpointIndexError(RecoupError, IndexError):
    """The index of a requested layer is out of bounds.

    Attributes:
        index: The index.
        limit: The first index that is too high.
        context: The function that was called.

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
    """A layer without a checkpoint was requested."""

    def __str__(self) -> str:
        """Return the message, which a KeyError would show in quotes."""
        return Exception.__str__(self)


class BudgetWarning(RecoupError, UserWarning):  # noqa: N818 (it is a warning)
    """A training step is not the measured one, or cannot fit.

    Gradients are still right; the peak may exceed the budget. A filter that raises
    warnings makes it an error, which `RecoupError` catches like all others.

    Attributes:
        needed_bytes: The predicted bytes of the step; 0 if it cannot be predicted.
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

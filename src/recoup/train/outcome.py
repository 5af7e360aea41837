"""Outcomes: whether a step counted, which a device may know before the host does."""

import torch
from torch import Tensor


class Outcome:
    """Whether a step was skipped: known, or on its way from the device.

    Reading it waits for the step, and for nothing that was issued after it.

    Args:
        skipped: Whether it was, or a flag of one element that the device has set.

    Examples:
        >>> outcome = Outcome(torch.tensor([True]))
        >>> outcome.is_known, outcome.skipped, outcome.is_known
        (False, True, True)
    """

    __slots__ = ("_arrived", "_copy", "_skipped", "flag")

    def __init__(self, skipped: bool | Tensor) -> None:  # noqa: FBT001 (it is the outcome)
        self._skipped: bool | None = None
        self._arrived: torch.Event | None = None
        self.flag: Tensor | None = None
        if isinstance(skipped, Tensor):
            self.flag = skipped
            self._copy = skipped.to("cpu", non_blocking=True)
            if skipped.device.type != "cpu":
                self._arrived = torch.Event(skipped.device)
                self._arrived.record()
        else:
            self._skipped = skipped

    @property
    def is_known(self) -> bool:
        """Whether the host knows it already."""
        return self._skipped is not None

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped; waits until the device has told."""
        if self._skipped is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._skipped = bool(self._copy)
            self.flag = self._arrived = None
        return self._skipped

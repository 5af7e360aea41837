"""What happened in a step, and in a whole run."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from recoup.train.budgeting.peaks import Peak
from recoup.train.saving.run_state import whole


class StepOutcome:
    """Whether a step was skipped: known, or on its way from the device.

    Reading it waits for the step, and for nothing that was issued after it.

    Examples:
        >>> outcome = StepOutcome(torch.tensor([True]))
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


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step of a `Trainer` did.

    Numbers that a device computed are read when they are asked for, and only then
    does the host wait for it.

    Attributes:
        number: Which step it was, from 1; skipped ones count.
        parts: How many pieces the step's batches were computed in.
        seconds: The host's time. It does not wait for an accelerator.
    """

    number: int
    parts: int
    seconds: float
    loss_tensor: Tensor = field(repr=False)
    norm_tensor: Tensor | None = field(repr=False)
    used_scale: Tensor | float | None = field(repr=False)
    peak: Peak = field(repr=False)
    outcome: StepOutcome = field(repr=False)

    @property
    def stepped(self) -> bool:
        """Whether the parameters moved; False if the gradients overflowed."""
        return not self.outcome.skipped

    @property
    def skipped(self) -> bool:
        """Whether the parameters stayed as they were."""
        return self.outcome.skipped

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes alive on the device at a moment of the step, if measured.

        With `measure_memory=True` it is exactly that. By default an accelerator is
        asked when this is, and at the latest when the next step begins: what else ran
        there since the step counts too.
        """
        return self.peak.bytes

    @property
    def loss(self) -> float:
        """The weighted mean of the losses of this process's batches."""
        return float(whole(self.loss_tensor).item())

    @property
    def gradient_norm(self) -> float | None:
        """The norm of all gradients before clipping, if something asked for it."""
        if self.norm_tensor is None:
            return None
        return float(whole(self.norm_tensor).item())

    @property
    def scale(self) -> float | None:
        """The loss scale that the step used; None without a scaler."""
        return None if self.used_scale is None else float(self.used_scale)


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run of `Trainer.fit` did.

    Attributes:
        epochs: Epochs that are finished, of earlier runs too.
        steps: Steps of this run, skipped ones included.
        skipped: Skipped ones among them.
        seconds: The time of this run.
        interrupted: Whether it was asked to stop before the end.
        last: The last step of this run.
    """

    epochs: int
    steps: int
    skipped: int
    seconds: float
    interrupted: bool
    last: StepResult | None

"""Several schedulers of learning rates as one."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler


class JointScheduler:
    """Advance several schedulers together.

    Args:
        members: The schedulers.
    """

    def __init__(self, members: Sequence[LRScheduler]) -> None:
        self.members = list(members)

    def step(self) -> None:
        """Advance every member."""
        for member in self.members:
            member.step()

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the learning rates of all members' groups, in order."""
        return [rate for member in self.members for rate in member.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all members, in order."""
        return {"members": [member.state_dict() for member in self.members]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the states of schedulers like these."""
        for member, state in zip(self.members, state_dict["members"], strict=True):
            member.load_state_dict(state)


def as_schedulers(
    given: LRScheduler | Sequence[LRScheduler] | None,
) -> list[LRScheduler]:
    """Return schedulers as a list, which has none without any."""
    if given is None:
        return []
    return list(given) if isinstance(given, Sequence) else [given]


def joined_schedulers(
    schedulers: Sequence[LRScheduler],
) -> LRScheduler | JointScheduler | None:
    """Return one scheduler that advances all, or None without any."""
    if len(schedulers) > 1:
        return JointScheduler(schedulers)
    return schedulers[0] if schedulers else None

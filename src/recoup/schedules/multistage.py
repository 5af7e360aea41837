"""Multistage: Revolve over several tiers, the busiest slots in the fastest."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from recoup.errors import UsageError
from recoup.schedules.revolve import Chunked
from recoup.schedules.schedule import (
    Action,
    Counts,
    Restore,
    Snapshot,
    require_at_least,
)


@dataclass(frozen=True, slots=True)
class Multistage:
    """Reverse a loop with slots in several tiers, say device, host and disk.

    The actions are those of `Chunked` with all slots together, so the evaluations are
    the fewest there are. Writes and reads of every slot are counted beforehand, and
    the slots used most go to the first tier (P. Stumm and A. Walther, MultiStage
    approaches for optimal offline checkpointing, SIAM Journal on Scientific Computing
    31, 2009).

    Args:
        steps: How many steps the loop has.
        tier_slots: How many slots each tier has, the fastest first. The state at the
            beginning takes one.
        chunk: Steps to tape at once.

    Examples:
        >>> schedule = Multistage(1000, tier_slots=(3, 7))
        >>> schedule.tiers()  # the tier of each slot; the beginning is in the last
        (1, 1, 1, 1, 1, 1, 1, 0, 0, 0)
        >>> schedule.counts().evaluations
        4636
    """

    steps: int
    tier_slots: tuple[int, ...]
    chunk: int = 1

    def __post_init__(self) -> None:
        require_at_least(0, steps=self.steps)
        require_at_least(1, slots=sum(self.tier_slots), chunk=self.chunk)
        if any(slots < 0 for slots in self.tier_slots):
            raise UsageError(
                f"no tier has a negative number of slots: got {self.tier_slots}. Give "
                "0 for a tier that is not to be used."
            )

    def tiers(self) -> tuple[int, ...]:
        """Return the tier of every slot.

        Costs one pass over the actions, which is as long as the schedule.
        """
        uses = self._uses()
        busiest = sorted(range(sum(self.tier_slots)), key=lambda slot: -uses[slot])
        places = [tier for tier, n in enumerate(self.tier_slots) for _ in range(n)]
        found = dict(zip(busiest, places, strict=True))
        return tuple(found[slot] for slot in range(len(found)))

    def transfers(self) -> tuple[int, ...]:
        """Return how many states are written to and read from each tier."""
        uses = self._uses()
        moved = [0] * len(self.tier_slots)
        for slot, tier in enumerate(self.tiers()):
            moved[tier] += uses[slot]
        return tuple(moved)

    def actions(self) -> Iterator[Action]:
        """Return what to do, in order; snapshots say which tier."""
        tiers = self.tiers()
        for action in self._plain().actions():
            if isinstance(action, Snapshot):
                yield Snapshot(action.step, action.slot, tiers[action.slot])
            else:
                yield action

    def counts(self) -> Counts:
        """Return what the schedule costs."""
        return self._plain().counts()

    def _plain(self) -> Chunked:
        return Chunked(self.steps, slots=sum(self.tier_slots), chunk=self.chunk)

    def _uses(self) -> Counter[int]:
        return Counter(
            action.slot
            for action in self._plain().actions()
            if isinstance(action, (Snapshot, Restore))
        )

"""Slots: where the states of a running schedule are, and the view a user gets."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class KeptState:
    """A state in a slot: the step it comes before, and what the backend made of it."""

    step: int
    held: Any
    owned: bool = True

    def drop(self) -> None:
        """Let a tier forget it, if it is in one and these slots put it there."""
        if self.owned and hasattr(self.held, "drop"):
            self.held.drop()


class Slots:
    """The states that a schedule holds now, by slot."""

    def __init__(self, kept: Mapping[int, KeptState] | None = None) -> None:
        self._kept: dict[int, KeptState] = dict(kept or {})

    def put(self, slot: int, step: int, held: Any) -> None:
        """Keep a state."""
        self._kept[slot] = KeptState(step, held)

    def get(self, slot: int) -> Any:
        """Return what is held in a slot."""
        return self._kept[slot].held

    def prefetch(self, slot: int) -> None:
        """Begin to bring a state back, if it is in a tier where that takes time."""
        kept = self._kept.get(slot)
        if kept is not None and hasattr(kept.held, "prefetch"):
            kept.held.prefetch()

    def free(self, slot: int) -> None:
        """Forget a state."""
        self._kept.pop(slot).drop()

    def clear(self) -> None:
        """Forget all."""
        for slot in list(self._kept):
            self.free(slot)

    def copy(self) -> "Slots":
        """Return other slots that hold the same states, and leave them to these."""
        return Slots({slot: replace(k, owned=False) for slot, k in self._kept.items()})

    def by_step(self) -> dict[int, Any]:
        """Return what is held, by the step it comes before, in order."""
        found = {kept.step: kept.held for kept in self._kept.values()}
        return dict(sorted(found.items()))

    def __len__(self) -> int:
        return len(self._kept)


class Checkpoints(Mapping[int, Any]):
    """The states that a loop holds, by position: the state after so many steps.

    It reads like the dictionary of the seed's guide. The state at the beginning is held
    besides and not among them. Backward frees the states as it uses them, so that a
    variable that still names the checkpoints does not keep memory.

    They are values: no gradient passes through them. What a loss needs besides the
    final state is an output of the steps (`with_outputs`).
    """

    def __init__(
        self,
        slots: Slots,
        take: Callable[[Any], Any],
        pull_back: Callable[..., Any],
        *,
        hidden: int | None = 0,
    ) -> None:
        self._slots = slots
        self._take = take
        self._pull_back = pull_back
        self._hidden = hidden

    def __getitem__(self, position: int) -> Any:
        return self._take(self._shown()[position])

    def __iter__(self) -> Iterator[int]:
        return iter(self._shown())

    def __len__(self) -> int:
        return len(self._shown())

    def __repr__(self) -> str:
        return f"Checkpoints(positions={list(self)})"

    def pull(self, cotangent: Any) -> Any:
        """Return the gradient of the initial state for a cotangent of the final one.

        The states stay as they are, so it can be called again.

        Costs what the loop's backward costs.
        """
        return self._pull_back(cotangent)

    def _shown(self) -> dict[int, Any]:
        held = self._slots.by_step()
        return {step: kept for step, kept in held.items() if step != self._hidden}

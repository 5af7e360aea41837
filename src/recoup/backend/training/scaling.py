"""The border to torch's gradient scaler: public access to its private state."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class OpenScaler(torch.amp.GradScaler):
    """Torch's gradient scaler, with access to its overflow flags and decisions.

    Subclasses override `decided`; the arithmetic is torch's.

    Examples:
        >>> OpenScaler("cpu").scale_tensor is None  # made at the first `scale`
        True
    """

    @property
    def scale_tensor(self) -> Tensor | None:
        """The scale on its device, or None before the first `scale`."""
        return self._scale

    def overflow_flags(self, optimizer: Optimizer | None = None) -> list[Tensor]:
        """Return this iteration's overflow flags per device, of one optimizer or all.

        A flag is above zero if a gradient on its device was not finite.
        """
        # `get`, because the states are a defaultdict: a lookup would add an entry.
        states = self._per_optimizer_states
        chosen = states.values() if optimizer is None else [states.get(id(optimizer))]
        return [
            flag
            for state in chosen
            if state is not None
            for flag in state["found_inf_per_device"].values()
        ]

    @property
    def checked_optimizers(self) -> int:
        """The number of optimizers whose gradients were checked in this iteration."""
        states = self._per_optimizer_states.values()
        return sum(bool(state["found_inf_per_device"]) for state in states)

    def set_scale(self, scale: float) -> None:
        """Set the scale, also before its tensor exists; does not synchronise."""
        self._init_scale = scale
        if self._scale is not None:
            self._scale.fill_(scale)

    def forget_checks(self) -> None:
        """Discard this iteration's overflow flags; keep the scale."""
        self._per_optimizer_states.clear()

    def decided(self, optimizer: Optimizer, *, skipped: bool) -> None:
        """Handle the decision to run or skip an optimizer's step; for subclasses."""

    def _maybe_opt_step(
        self,
        optimizer: Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        flags = optimizer_state["found_inf_per_device"].values()
        skipped = any(flag.item() for flag in flags)
        self.decided(optimizer, skipped=skipped)
        return None if skipped else optimizer.step(*args, **kwargs)

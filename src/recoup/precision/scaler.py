"""Loss scaling for float16: torch's scaler with bounds, outcomes and statistics."""

import ctypes
import logging
import math
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from recoup.backend.training.optimizer_steps import parameters_of
from recoup.backend.training.scaling import OpenScaler
from recoup.errors import UsageError


@dataclass(slots=True)
class KnownScale:
    """A scale and its count of finite steps, updated as torch does on the device.

    Attributes:
        scale: The scale, a number of 32 bits.
        good_steps: Steps without overflow since it last changed.

    Examples:
        >>> known = KnownScale(8.0)
        >>> known.update(overflowed=True, growth=2.0, backoff=0.5, interval=1)
        >>> known.scale
        4.0
    """

    scale: float
    good_steps: int = 0

    def update(
        self, *, overflowed: bool, growth: float, backoff: float, interval: int
    ) -> None:
        """Update as `torch._amp_update_scale_` does, rounding included."""
        if overflowed:
            self.scale = _rounded(self.scale * backoff)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == interval:
            grown = _rounded(self.scale * growth)
            # As on the device: a scale that would become infinite is kept.
            if math.isfinite(grown):
                self.scale = grown
            self.good_steps = 0


def _rounded(number: float) -> float:
    return ctypes.c_float(number).value


@dataclass(slots=True)
class OptimizerOutcome:
    """The outcome of an optimizer's step: on the host, or on the device.

    Attributes:
        optimizer: The optimizer.
        skipped: Whether the step was skipped; a flag on the device, if only that knows.
    """

    optimizer: ref[Optimizer]
    skipped: bool | Tensor

    def was_skipped(self) -> bool:
        """Return whether it was skipped; synchronises if only the device knows."""
        self.skipped = bool(self.skipped)
        return self.skipped


class Outcomes:
    """The last step of each optimizer, until an iteration after it begins.

    Examples:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.ones(1)])
        >>> outcomes = Outcomes()
        >>> outcomes.add(optimizer, skipped=True)
        >>> [outcome.was_skipped() for outcome in outcomes.last(optimizer)]
        [True]
        >>> outcomes.overflowed(checked_optimizers=1)
        True
    """

    def __init__(self) -> None:
        self._found: dict[int, OptimizerOutcome] = {}
        self._iteration_is_over = False

    def __contains__(self, optimizer: Optimizer) -> bool:
        return id(optimizer) in self._found

    def add(self, optimizer: Optimizer, *, skipped: bool | Tensor) -> None:
        """Record a step."""
        self._found[id(optimizer)] = OptimizerOutcome(ref(optimizer), skipped)

    def discard(self, optimizer: Optimizer) -> None:
        """Forget the optimizer's last step, because another one begins."""
        self._found.pop(id(optimizer), None)

    def clear(self) -> None:
        """Forget all steps."""
        self._found.clear()

    def begin_step(self) -> None:
        """Begin a step; the first of an iteration ends the previous iteration."""
        if self._iteration_is_over:
            self.clear()
            self._iteration_is_over = False

    def end_iteration(self) -> None:
        """End the iteration."""
        self._iteration_is_over = True

    def last(self, optimizer: Optimizer | None) -> list[OptimizerOutcome]:
        """Return the last steps: of one optimizer, or of all."""
        chosen = [
            outcome
            for outcome in self._found.values()
            if optimizer is None or outcome.optimizer() is optimizer
        ]
        if not chosen:
            raise UsageError(
                "expected a step of that optimizer before step_was_skipped, but this "
                "scaler has taken none of that optimizer; call scaler.step(optimizer)."
            )
        return chosen

    def overflowed(self, checked_optimizers: int) -> bool | None:
        """Return whether a gradient overflowed in this iteration, if the host knows.

        Args:
            checked_optimizers: The number of optimizers whose gradients were checked.
                One that was unscaled and not stepped has no outcome.
        """
        if self._iteration_is_over:
            return None
        known = [outcome.skipped for outcome in self._found.values()]
        if any(skipped is True for skipped in known):
            return True
        if known and all(skipped is False for skipped in known):
            return False if len(known) == checked_optimizers else None
        return None


_log = logging.getLogger(__name__)
# A healthy run overflows once every few thousand steps, a diverging one at every step.
_LOGGED_AT_FIRST, _LOGGED_LATER = 10, 100
_OWN_STATE = ("min_scale", "max_scale", "dynamic", "total_updates", "skipped_updates")

_PROGRESS = ("scale", "_growth_tracker", "total_updates", "skipped_updates")
"""The part of a state that a run changes; the rest is settings."""


class GradientScaler(OpenScaler):
    """Scale the loss so that small float16 gradients survive, and skip overflows.

    It is a `torch.amp.GradScaler` and can replace one anywhere. In addition, the scale
    stays between `min_scale` and `max_scale` (torch's reaches 0 after 166 overflows in
    a row, and stays there); `step_was_skipped` reports the last step; overflows are
    counted and logged; `dynamic=False` keeps the scale fixed.

    The order in a training loop is `scale(loss).backward()`, `unscale_(optimizer)`,
    clip, `step(optimizer)`, `update()`, and then the schedule, if the step was not
    skipped. bfloat16 has the range of float32 and needs no scaler.

    Costs: the synchronisation of torch's `step`, and no other. With `fused` optimizers
    torch's has none; then the outcome is on the device until it is read, and reading
    synchronises.

    Args:
        device: The kind of device; by default the accelerator, or else the CPU.
        init_scale: The first scale.
        growth_factor: The factor of the scale after `growth_interval` finite steps.
        backoff_factor: The factor of the scale after an overflow.
        growth_interval: Steps without overflow before the scale grows.
        enabled: False disables the scaler.
        min_scale: The lower bound of the scale.
        max_scale: The upper bound of the scale.
        dynamic: False keeps the scale; steps that overflow are still skipped.

    Raises:
        UsageError: A number is out of range, or there is no such device here.

    Examples:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> scaler = GradientScaler("cpu", init_scale=8.0)
        >>> scaler.scale((weight * torch.tensor([1.0, torch.inf])).sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.step_was_skipped(), scaler.get_scale(), scaler.overflow_rate
        (True, 4.0, 1.0)
    """

    def __init__(  # noqa: PLR0913 (torch's arguments, in torch's order)
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,  # noqa: FBT001, FBT002
        *,
        min_scale: float = 1.0,
        max_scale: float = 2.0**32,
        dynamic: bool = True,
    ) -> None:
        device = device or default_device()
        if enabled:
            check_device(device)
            check_bounds(init_scale, min_scale, max_scale)
            check_factors(growth_factor, backoff_factor, growth_interval)
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._min_scale, self._max_scale = float(min_scale), float(max_scale)
        self._dynamic = dynamic
        self._outcomes = Outcomes()
        self._known: KnownScale | None = KnownScale(float(init_scale))
        self._total_updates = 0
        self._known_overflows = 0
        self._unread_overflows: Tensor | None = None

    @property
    def min_scale(self) -> float:
        """The lower bound of the scale."""
        return self._min_scale

    @property
    def max_scale(self) -> float:
        """The upper bound of the scale."""
        return self._max_scale

    @property
    def known_scale(self) -> float | None:
        """The scale, if the host knows it without reading from the device.

        It does unless a fused optimizer has decided on a step.
        """
        return None if self._known is None else self._known.scale

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale adapts to overflows."""
        return self._dynamic

    @property
    def total_updates(self) -> int:
        """The number of iterations: calls of `update` after gradients were checked."""
        return self._total_updates

    @property
    def skipped_updates(self) -> int:
        """The number of iterations in which a gradient overflowed.

        Synchronises if steps of a fused optimizer have not been counted yet.
        """
        if self._unread_overflows is not None:
            found = int(self._unread_overflows.item())
            self._unread_overflows = None
            self._overflowed(found)
        return self._known_overflows

    @property
    def overflow_rate(self) -> float:
        """Skipped iterations as a share of all, 0 before the first."""
        if not self._total_updates:
            return 0.0
        return self.skipped_updates / self._total_updates

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, and check for overflows.

        Raises:
            UsageError: There are no gradients, or they are in float16 themselves.
        """
        if self.is_enabled():
            require_gradients(optimizer)
        try:
            super().unscale_(optimizer)
        except ValueError as error:
            # torch checks every gradient anyway, before it changes any.
            refuse_half(optimizer, error)
            raise

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer unless a gradient overflowed.

        Returns:
            The result of the optimizer's step, or None if it was skipped.

        Raises:
            UsageError: There are no gradients, they are in float16 themselves, or a
                closure was given, which would compute new gradients unscaled.
        """
        if not self.is_enabled():
            return super().step(optimizer, *args, **kwargs)
        # Frameworks pass their closure on, which is usually None.
        closure = args[0] if args else kwargs.pop("closure", None)
        if closure is not None:
            raise UsageError(
                "a scaled step takes no closure: its gradients would not be scaled; "
                "use bfloat16, which needs no scaler, or an optimizer without a "
                "closure."
            )
        self._outcomes.begin_step()
        require_gradients(optimizer)
        self._outcomes.discard(optimizer)
        result = super().step(optimizer, **kwargs)
        if optimizer not in self._outcomes:
            # Fused: the device decides. `update` adds to the flags in place.
            flags = self.overflow_flags(optimizer)
            self._outcomes.add(optimizer, skipped=_any(flags))
        return result

    def step_was_skipped(self, optimizer: Optimizer | None = None) -> bool:
        """Return whether the last step was skipped: of one optimizer, or of any.

        Synchronises after the step of a fused optimizer, otherwise not.

        Raises:
            UsageError: No step was taken with this scaler yet.
        """
        if not self.is_enabled():
            return False
        return any(outcome.was_skipped() for outcome in self._outcomes.last(optimizer))

    def skip_flag(self, optimizer: Optimizer) -> bool | Tensor:
        """Return whether the optimizer's last step was skipped, without waiting.

        Returns:
            The outcome if the host knows it. After the step of a fused optimizer a flag
            of one element on its device.

        Raises:
            UsageError: No step of it was taken with this scaler yet.
        """
        if not self.is_enabled():
            return False
        return self._outcomes.last(optimizer)[0].skipped

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the iteration: adapt the scale within its bounds.

        Args:
            new_scale: Set the scale to this instead.

        Raises:
            UsageError: The new scale is out of bounds, or there was no step.
        """
        if not self.is_enabled():
            return
        flags = self.overflow_flags()
        if not flags and (new_scale is None or self.scale_tensor is None):
            raise UsageError(
                "expected scaled gradients before update, found no scaled gradients; "
                "call scaler.scale(loss).backward() and scaler.step(optimizer) first."
            )
        if isinstance(new_scale, int | float):
            new_scale = float(new_scale)
            check_bounds(new_scale, self._min_scale, self._max_scale)
        overflowed = self._overflow(flags) if flags else False
        if new_scale is None and not self._dynamic:
            self.forget_checks()
        else:
            super().update(new_scale)
            self._know(new_scale, overflowed)
            self._stay_within_bounds()
        self._outcomes.end_iteration()
        self._count(overflowed, checked=bool(flags))

    def decided(self, optimizer: Optimizer, *, skipped: bool) -> None:
        """Record a step that the host has decided on."""
        self._outcomes.add(optimizer, skipped=skipped)

    def state_dict(self) -> dict[str, Any]:
        """Return the state: torch's five entries, the bounds, and the statistics."""
        state = super().state_dict()
        if state:
            state["min_scale"] = self._min_scale
            state["max_scale"] = self._max_scale
            state["dynamic"] = self._dynamic
            state["total_updates"] = self._total_updates
            state["skipped_updates"] = self.skipped_updates
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of `torch.amp.GradScaler`.

        Settings that torch's state lacks stay unchanged, and a scale out of bounds is
        moved into them.

        Raises:
            UsageError: The scale is not a number. Nothing has been changed.
        """
        if not self.is_enabled():
            return
        if math.isnan(state_dict.get("scale", 1.0)):
            raise UsageError(
                "expected a finite scale in the state of a scaler, got one that is not "
                "a number: the run that saved it was broken; load an earlier one."
            )
        super().load_state_dict(state_dict)
        own = {name: state_dict[name] for name in _OWN_STATE if name in state_dict}
        self._min_scale = float(own.get("min_scale", self._min_scale))
        self._max_scale = float(own.get("max_scale", self._max_scale))
        self._dynamic = bool(own.get("dynamic", self._dynamic))
        self._total_updates = int(own.get("total_updates", 0))
        self._known_overflows = int(own.get("skipped_updates", 0))
        self._unread_overflows = None
        self._outcomes.clear()
        scale = min(max(float(state_dict["scale"]), self._min_scale), self._max_scale)
        self.set_scale(scale)
        self._known = KnownScale(_rounded(scale), int(state_dict["_growth_tracker"]))

    def load_progress(self, state_dict: dict[str, Any]) -> None:
        """Load scale and counts of a state of this class; settings stay unchanged.

        Raises:
            UsageError: The scale is not a number. Nothing has been changed.
        """
        if not self.is_enabled():
            return
        kept = {n: v for n, v in self.state_dict().items() if n not in _PROGRESS}
        # The scale grows when the count equals the interval: beyond it, it never would.
        good_steps = min(state_dict["_growth_tracker"], kept["growth_interval"] - 1)
        self.load_state_dict({**state_dict, **kept, "_growth_tracker": good_steps})

    def __getstate__(self) -> dict[str, Any]:
        self._known_overflows = self.skipped_updates
        state = super().__getstate__()
        # Optimizers are not pickled with the scaler, so neither are their outcomes.
        state["_outcomes"] = Outcomes()
        return state

    def _overflow(self, flags: list[Tensor]) -> bool | Tensor:
        """Return whether the iteration overflowed: on the host, if already known."""
        known = self._outcomes.overflowed(self.checked_optimizers)
        return _any(flags) if known is None else known

    def _know(
        self,
        new_scale: float | Tensor | None,
        overflowed: bool | Tensor,  # noqa: FBT001 (the outcome)
    ) -> None:
        """Track the scale of the device on the host, as long as possible."""
        if isinstance(new_scale, float):
            self._known = KnownScale(_rounded(new_scale))
        elif new_scale is not None or isinstance(overflowed, Tensor):
            self._known = None
        elif self._known is not None:
            self._known.update(
                overflowed=overflowed,
                growth=self.get_growth_factor(),
                backoff=self.get_backoff_factor(),
                interval=self.get_growth_interval(),
            )

    def _stay_within_bounds(self) -> None:
        known, least, largest = self._known, self._min_scale, self._max_scale
        if known is not None:
            if least <= known.scale <= largest:
                return
            known.scale = _rounded(min(max(known.scale, least), largest))
        assert self.scale_tensor is not None, "made by the first scale()"
        self.scale_tensor.clamp_(least, largest)

    def _count(self, overflowed: bool | Tensor, *, checked: bool) -> None:  # noqa: FBT001 (the outcome)
        self._total_updates += checked
        if isinstance(overflowed, Tensor):
            unread = self._unread_overflows
            self._unread_overflows = (
                overflowed.int() if unread is None else unread + overflowed
            )
        elif overflowed:
            self._overflowed(1)

    def _overflowed(self, count: int) -> None:
        before = self._known_overflows
        self._known_overflows += count
        if not count or not _is_logged(before, self._known_overflows):
            return
        scale = self.get_scale()
        if not self._dynamic:
            _log.warning("Gradient overflow detected. The scale stays at %g", scale)
        elif scale <= self._min_scale:
            _log.warning(
                "Gradient overflow detected. The scale is at its minimum of %g: "
                "the values themselves leave the range of float16",
                scale,
            )
        else:
            _log.warning("Gradient overflow detected. Reducing scale to %g", scale)


def _any(flags: list[Tensor]) -> Tensor:
    first = flags[0]
    found = first > 0
    for flag in flags[1:]:
        found = found | (flag.to(first.device, non_blocking=True) > 0)
    return found


def _is_logged(before: int, after: int) -> bool:
    return (
        before < _LOGGED_AT_FIRST or before // _LOGGED_LATER != after // _LOGGED_LATER
    )


def default_device() -> str:
    """Return the kind of device to scale for: the accelerator, or else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def check_device(device: str) -> None:
    """Raise unless this machine has such a device."""
    if device != "cpu" and device != default_device():
        raise UsageError(
            f"expected a device of this machine for a scaler, but there is no such "
            f"device here: {device!r}; leave it out, or give 'cpu', or enabled=False."
        )


def check_bounds(scale: float, least: float, largest: float) -> None:
    """Raise unless the scale is between finite bounds above 0."""
    if not 0 < least <= scale <= largest or not math.isfinite(largest):
        raise UsageError(
            f"expected a scale between finite bounds above 0, got {scale:g} between "
            f"min_scale={least:g} and max_scale={largest:g}."
        )


def check_factors(growth: float, backoff: float, interval: int) -> None:
    """Raise unless the factors and the interval are in range."""
    if not growth > 1 or not 0 < backoff < 1 or interval < 1:
        raise UsageError(
            "expected growth_factor above 1, backoff_factor between 0 and 1 and "
            f"growth_interval of at least 1, got growth_factor={growth:g}, "
            f"backoff_factor={backoff:g} and growth_interval={interval}."
        )


def require_gradients(optimizer: Optimizer) -> None:
    """Raise unless there are gradients."""
    if all(parameter.grad is None for parameter in parameters_of(optimizer)):
        raise UsageError(
            "expected gradients, but the optimizer's parameters have no gradients; run "
            "the backward pass of scaler.scale(loss) first."
        )


def refuse_half(optimizer: Optimizer, error: Exception) -> None:
    """Raise if there are gradients in float16, which torch has refused."""
    gradients = (parameter.grad for parameter in parameters_of(optimizer))
    if any(grad is not None and grad.dtype is torch.float16 for grad in gradients):
        raise UsageError(
            "expected gradients in float32, got float16, whose small values unscaling "
            "would lose; keep the parameters in float32 and compute under autocast, "
            "instead of model.half()."
        ) from error

"""Mixed precision: `with MixedPrecisionScope():` around forward and the loss."""

from threading import get_ident
from typing import Any, Literal, Self, get_args

import torch

from recoup.errors import UnsupportedError, UsageError

Precision = Literal["fp32", "bf16", "fp16", "auto"]
"""The number format of mixed precision; `auto` depends on the hardware."""

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {dtype: name for name, dtype in FORMATS.items()}


def resolve_precision(
    precision: str | torch.dtype, device: torch.device | str
) -> torch.dtype:
    """Return the dtype of a precision on a device.

    `auto` is bfloat16 where the hardware supports it, because its range is that of
    float32 and it needs no loss scaling; otherwise it is float16. On the CPU it is
    bfloat16.

    Raises:
        UsageError: The precision is unknown.
        UnsupportedError: Autocast does not exist for the device.

    Examples:
        >>> resolve_precision("auto", "cpu")
        torch.bfloat16
        >>> resolve_precision("fp16", "cpu")
        torch.float16
    """
    kind = torch.device(device).type
    name = check_precision(precision)
    if name == "fp32":
        return torch.float32
    if not torch.amp.is_autocast_available(kind):
        raise UnsupportedError(
            f"expected a device with autocast for mixed precision, but torch has no "
            f"autocast on {kind!r}; use precision='fp32' there."
        )
    return _by_hardware(kind) if name == "auto" else FORMATS[name]


def check_precision(precision: str | torch.dtype) -> str:
    """Return the name of a precision, given by name or by dtype.

    Examples:
        >>> check_precision(torch.bfloat16)
        'bf16'
    """
    name = _NAMES.get(precision) if isinstance(precision, torch.dtype) else precision
    if name is None or name not in get_args(Precision):
        raise UsageError(
            f"expected a precision of {', '.join(get_args(Precision))}, got "
            f"{precision!r}."
        )
    return name


def _by_hardware(kind: str) -> torch.dtype:
    if kind == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


class MixedPrecisionScope:
    """Compute products, convolutions and attention in 16 bits inside the block.

    It is `torch.autocast` with the format chosen by the hardware. Parameters stay in
    float32, and torch keeps norms, losses and sums there too, so the loss belongs
    inside the block. Backward belongs outside; operators run in it as in forward, also
    in regions of recoup, which record below autocast.

    A scope may be entered again, nested, and used by several threads at a time; `fp32`
    inside another one switches autocast off.

    Args:
        precision: `"auto"`, `"bf16"`, `"fp16"` or `"fp32"`, or the dtype itself. With
            `"fp16"` gradients need a `GradientScaler`.
        device: The device of the block; by default the accelerator, or else the CPU.
        enabled: False disables the scope.

    Raises:
        UsageError: The precision is unknown.
        UnsupportedError: The device has no autocast.

    Examples:
        >>> layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
        >>> with MixedPrecisionScope("bf16", device="cpu"):
        ...     y = layer(x)
        >>> y.dtype, layer.weight.dtype
        (torch.bfloat16, torch.float32)
    """

    def __init__(
        self,
        precision: str | torch.dtype = "auto",
        *,
        device: torch.device | str | None = None,
        enabled: bool = True,
    ) -> None:
        if device is None:
            device = torch.accelerator.current_accelerator(check_available=True)
        self._device_type = torch.device(device or "cpu").type
        self._dtype = resolve_precision(precision, self._device_type)
        self.is_enabled = enabled
        # By thread, because autocast is: threads may share one scope.
        self._open: dict[int, list[torch.autocast | None]] = {}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of computation in the block."""
        return self._dtype

    @property
    def needs_scaler(self) -> bool:
        """Whether gradients need a `GradientScaler`: float16 only."""
        return self.is_enabled and self._dtype is torch.float16

    def __enter__(self) -> Self:
        entered = self._autocast() if self.is_enabled else None
        if entered is not None:
            entered.__enter__()
        self._open.setdefault(get_ident(), []).append(entered)
        return self

    def __exit__(self, *error: Any) -> None:
        thread = get_ident()
        entered = self._open[thread].pop()
        if not self._open[thread]:
            del self._open[thread]
        if entered is not None:
            entered.__exit__(*error)

    def _autocast(self) -> torch.autocast | None:
        # Autocast has no float32: switch it off where an outer one is on.
        if self._dtype is torch.float32:
            if not torch.is_autocast_enabled(self._device_type):
                return None
            return torch.autocast(self._device_type, enabled=False)
        return torch.autocast(self._device_type, dtype=self._dtype)

"""Mixed precision: `with MixedPrecisionScope():` around forward and the loss."""

from threading import get_ident
from types import TracebackType
from typing import Self

import torch

from recoup.precision.formats import resolve_precision


class MixedPrecisionScope:
    """Compute products, convolutions and attention in 16 bits inside the block.

    It is `torch.autocast` with the format chosen by the hardware. Parameters stay in
    float32, and torch keeps norms, losses and sums there too, so the loss belongs
    inside the block. Backward belongs outside; operators run in it as they ran in
    forward, in regions of recoup as well: these record below autocast.

    A scope may be entered again, nested, and used by several threads at once; `fp32`
    inside another one switches autocast off.

    Args:
        precision: `"auto"`, `"bf16"`, `"fp16"` or `"fp32"`, or the type itself. With
            `"fp16"` gradients need a `GradientScaler`.
        device: Where the block computes; by default the accelerator, or else the CPU.
        enabled: False makes the scope do nothing.

    Raises:
        UsageError: The precision is none of these.
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
        # By thread, because autocast is: threads may use one scope at once.
        self._open: dict[int, list[torch.autocast | None]] = {}

    @property
    def dtype(self) -> torch.dtype:
        """The type that the block computes in."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        thread = get_ident()
        entered = self._open[thread].pop()
        if not self._open[thread]:
            del self._open[thread]
        if entered is not None:
            entered.__exit__(kind, error, traceback)

    def _autocast(self) -> torch.autocast | None:
        # Autocast has no float32: there it is switched off, where an outer one is on.
        if self._dtype is torch.float32:
            if not torch.is_autocast_enabled(self._device_type):
                return None
            return torch.autocast(self._device_type, enabled=False)
        return torch.autocast(self._device_type, dtype=self._dtype)

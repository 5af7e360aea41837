"""Names of number formats, and which one suits the hardware."""

from typing import Literal, get_args

import torch

from recoup.errors import UnsupportedError, UsageError

Precision = Literal["fp32", "bf16", "fp16", "auto"]
"""What mixed precision computes in; `auto` asks the hardware."""

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


def resolve_precision(
    precision: str | torch.dtype, device: torch.device | str
) -> torch.dtype:
    """Return the type that a precision means on a device.

    `auto` is bfloat16 where the hardware has it, because its range is that of float32
    and it needs no loss scaling; otherwise it is float16. On the CPU it is bfloat16.

    Raises:
        UsageError: The precision is none of the known ones.
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
            f"mixed precision was asked for on {kind!r}, where torch has no autocast. "
            "Use precision='fp32' there."
        )
    return _by_hardware(kind) if name == "auto" else _TYPES[name]


def check_precision(precision: str | torch.dtype) -> str:
    """Return the name of a precision, given by name or by type.

    Raises:
        UsageError: It is none of the known ones.

    Examples:
        >>> check_precision(torch.bfloat16)
        'bf16'
    """
    name = _NAMES.get(precision) if isinstance(precision, torch.dtype) else precision
    if name is None or name not in get_args(Precision):
        raise UsageError(
            f"a precision is one of {', '.join(get_args(Precision))}: got "
            f"{precision!r}."
        )
    return name


def _by_hardware(kind: str) -> torch.dtype:
    if kind == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16

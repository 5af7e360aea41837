"""The 8-bit tier: one byte per number, and a scale for each block."""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from recoup.engine.tiers.device import Device
from recoup.engine.tiers.encoded import Coded, Wrapper, check_place, in_blocks, trimmed
from recoup.engine.tiers.protocol import SMALLEST_BYTES, LossyTier, Stored, Tier

BLOCK = 256
"""Elements that share a scale: 4 bytes per 256, an overhead of 1/64."""

_FLOATING = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_COMPLEX = {
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
}
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
_PRECISE = {bits: precise for precise, bits in _BITS.items()}
_LEVELS = 126
"""The largest code of a finite number; three codes beyond it are the infinities and
NaN."""


@dataclass(frozen=True)
class EightBit(Wrapper, LossyTier):
    """Keep floating-point numbers in 8 bits, scaled by blocks of 256 elements.

    With m the largest finite magnitude in its block, the error of each number is at
    most m / 250 + 2^-126; 16-bit numbers are also rounded to their dtype. Infinities
    and NaN are exact; so are integers, booleans and 8-bit dtypes. Complex numbers are
    pairs. The bound also holds on lossy tiers, because they get the scales as integers.

    Costs: some passes over the storage to put it and to get it; no synchronisation.

    Args:
        on: The tier that keeps the bytes; by default the device.
        smallest_bytes: Storages of fewer bytes are unchanged.

    Raises:
        UsageError: `on` is no tier.

    Examples:
        >>> stored = EightBit().put(torch.tensor([1.0, -0.5, float("inf")]))
        >>> stored.get()
        tensor([ 1.0000, -0.5000,     inf])
    """

    on: Tier = field(default_factory=Device)
    smallest_bytes: int = SMALLEST_BYTES

    def __post_init__(self) -> None:
        check_place(self.on, "EightBit")

    def put(self, storage: Tensor, guard: Tensor | None = None) -> Stored:
        """Round the storage and put the result in the other tier."""
        dtype = storage.dtype
        if dtype in _COMPLEX:
            storage = storage.view(_COMPLEX[dtype])
        elif dtype not in _FLOATING:
            return self.on.put(storage, guard)
        parts = encode(storage)
        return Coded(self.on, parts, partial(decode, dtype))


def encode(storage: Tensor) -> tuple[Tensor, Tensor]:
    """Return a code for each number, and the bits of a scale for each block.

    Scales are integers, which no tier rounds: their errors would affect whole blocks.
    """
    precise = torch.float64 if storage.dtype is torch.float64 else torch.float32
    rows = in_blocks(storage, BLOCK).to(precise)
    finite = torch.where(rows.isfinite(), rows, torch.zeros_like(rows))
    scale = finite.abs().amax(1, keepdim=True) / _LEVELS
    nonzero = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = (finite / nonzero).round().clamp(-_LEVELS, _LEVELS)
    codes = torch.where(rows.isposinf(), 127, codes)
    codes = torch.where(rows.isneginf(), -127, codes)
    codes = torch.where(rows.isnan(), -128, codes)
    return codes.view(-1)[: storage.numel()].to(torch.int8), scale.view(-1).view(
        _BITS[precise]
    )


def decode(dtype: torch.dtype, codes: Tensor, scale_bits: Tensor) -> Tensor:
    """Return the storage in its original dtype."""
    rows = in_blocks(codes, BLOCK)
    scale = scale_bits.view(_PRECISE[scale_bits.dtype])
    wide = rows.to(scale.dtype) * scale.unsqueeze(1)
    wide = torch.where(rows == 127, torch.inf, wide)
    wide = torch.where(rows == -127, -torch.inf, wide)
    wide = torch.where(rows == -128, torch.nan, wide)
    real = trimmed(wide.view(-1), codes.numel()).to(_COMPLEX.get(dtype, dtype))
    return real.view(dtype)

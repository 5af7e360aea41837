"""The half tier: 32- and 64-bit numbers kept in 16 bits."""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from recoup.engine.tiers.device import Device
from recoup.engine.tiers.encoded import Coded, Wrapper, check_place, in_blocks, trimmed
from recoup.engine.tiers.protocol import SMALLEST_BYTES, LossyTier, Stored, Tier
from recoup.errors import UsageError

BLOCK = 1024
"""Elements that share an exponent: 2 bytes per 2048, an overhead of 1/1024."""

_WIDE = frozenset({torch.float32, torch.float64})
_COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}


@dataclass(frozen=True)
class Half(Wrapper, LossyTier):
    """Keep 32- and 64-bit floating-point numbers in 16 bits.

    Every 1024 elements share an exponent, which is zero unless one of them is beyond
    the 16-bit range: nothing finite becomes infinite. With m the largest finite
    magnitude among the 1024, the error of x is at most

    - for bfloat16: |x| / 2^8;
    - for float16: |x| / 2^11, or 2^-25 where that is more; if m is above 65504, then
      |x| / 2^11, or m / 2^39 where that is more.

    (and a 4000th of it more for 64-bit numbers, which are rounded twice).

    In bfloat16 the error of numbers below 2^-126 is at most 2^-134 (m / 2^260 if m is
    above the range). Infinities and NaN are exact; so are integers, booleans and
    numbers of 16 bits or fewer. Complex numbers are pairs.

    Costs: some passes over the storage to put it and to get it; no synchronisation.
    On the CPU the exponents are omitted if all are zero.

    Args:
        on: The tier that keeps the 16 bits; by default the device.
        dtype: `torch.bfloat16` or `torch.float16`.
        smallest_bytes: Storages of fewer bytes are unchanged.

    Raises:
        UsageError: `on` is no tier, or the dtype is neither of the two.

    Examples:
        >>> stored = Half(dtype=torch.float16).put(torch.tensor([0.1, 7e4, 1.0]))
        >>> stored.get()
        tensor([9.9976e-02, 7.0016e+04, 1.0000e+00])
    """

    on: Tier = field(default_factory=Device)
    dtype: torch.dtype = torch.bfloat16
    smallest_bytes: int = SMALLEST_BYTES

    def __post_init__(self) -> None:
        check_place(self.on, "Half")
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise UsageError(
                f"expected torch.bfloat16 or torch.float16 for Half, got {self.dtype}."
            )

    def put(self, storage: Tensor, guard: Tensor | None = None) -> Stored:
        """Round the storage and put the result in the other tier."""
        dtype = storage.dtype
        if dtype in _COMPLEX:
            storage = storage.view(_COMPLEX[dtype])
        elif dtype not in _WIDE:
            return self.on.put(storage, guard)
        halves, exponents = encode(storage, self.dtype)
        # On an accelerator this check would synchronise.
        needless = exponents.device.type == "cpu" and not exponents.any()
        parts = [halves] if needless else [halves, exponents]
        return Coded(self.on, parts, partial(decode, dtype))


def encode(storage: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the numbers in 16 bits, and the exponents they were divided by."""
    rows = in_blocks(storage, BLOCK)
    finite = torch.where(rows.isfinite(), rows, torch.zeros_like(rows))
    largest = finite.abs().amax(1, keepdim=True)
    limit = torch.finfo(dtype).max
    # 2^16 and 2^128 are the first powers of two beyond the ranges.
    top = 15 if dtype is torch.float16 else 127
    exponent = torch.where(largest > limit, largest.frexp().exponent - top, 0)
    scaled = rows * torch.exp2(-exponent.to(rows.dtype))
    halves = scaled.view(-1)[: storage.numel()].to(dtype)
    return halves, exponent.view(-1).to(torch.int16)


def decode(
    dtype: torch.dtype, halves: Tensor, exponents: Tensor | None = None
) -> Tensor:
    """Return the storage in its original dtype."""
    real = _COMPLEX.get(dtype, dtype)
    if exponents is None:
        return halves.to(real).view(dtype)
    rows = in_blocks(halves, BLOCK)
    scale = torch.exp2(exponents.to(real)).unsqueeze(1)
    # The largest numbers may have been rounded up beyond the dtype's range.
    largest = torch.finfo(real).max
    wide = (rows.to(real) * scale).clamp_(-largest, largest)
    wide = torch.where(rows.isinf(), rows.to(real), wide).view(-1)
    return trimmed(wide, halves.numel()).view(dtype)

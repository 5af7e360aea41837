"""The packed tier: values kept exactly in fewer bits, where possible."""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from recoup.engine.tiers.device import Device
from recoup.engine.tiers.encoded import Coded, Wrapper, check_place, in_blocks
from recoup.engine.tiers.protocol import SMALLEST_BYTES, ExactTier, Stored, Tier
from recoup.errors import UsageError

_BITS = (1, 2, 4, 8, 16, 32, 64, 128)
_NARROWER = {
    torch.float64: (torch.bfloat16, torch.float16, torch.float32),
    torch.float32: (torch.bfloat16, torch.float16),
}
_SAME_SIZE = {torch.float64: torch.int64, torch.float32: torch.int32}
_WIDTHS = {torch.int8: 8, torch.int16: 16, torch.int32: 32}
_INTEGERS = {torch.int16: 16, torch.int32: 32, torch.int64: 64}
_GLANCE = 256
"""Elements that are checked before all of them are."""


@dataclass(frozen=True)
class Packed(Wrapper, ExactTier):
    """Keep storages in fewer bytes where that is lossless.

    Booleans are kept as bits, if their bytes are 0 and 1. Integers, such as the indices
    of a pooling layer, are kept in the smallest dtype that spans their values.
    Floating-point numbers that all fit a narrower dtype, because they were cast up from
    it, are kept in that dtype. Anything else is kept unchanged.

    Costs: putting a storage of booleans, of integers, or of 32- or 64-bit numbers reads
    it once to check whether it fits, and synchronises on an accelerator. Its bits
    decide, not the dtype of the first saved tensor: the same storage may be saved in
    several dtypes.

    Args:
        on: The tier that keeps the bytes; by default the device.
        smallest_bytes: Storages of fewer bytes are unchanged.

    Raises:
        UsageError: `on` is no exact tier. To pack and to round, write
            `Half(Packed(...))`.

    Examples:
        >>> mask = torch.tensor([True, False, True])
        >>> Packed().put(mask).get()
        tensor([ True, False,  True])
    """

    on: Tier = field(default_factory=Device)
    smallest_bytes: int = SMALLEST_BYTES

    def __post_init__(self) -> None:
        check_place(self.on, "Packed")
        if not isinstance(self.on, ExactTier):
            raise UsageError(
                f"expected an exact tier inside Packed, got the lossy {self.on!r}; "
                "swap them: Half(Packed(Host()))."
            )

    def put(self, storage: Tensor, guard: Tensor | None = None) -> Stored:
        """Pack the storage, if that is lossless, and put it in the other tier."""
        dtype = storage.dtype
        if dtype is torch.bool and _is_zeros_and_ones(storage):
            decode = partial(_from_bits, storage.numel())
            return Coded(self.on, [_to_bits(storage)], decode)
        if dtype in _INTEGERS and storage.numel() > 0:
            least, largest = (int(end) for end in storage.aminmax())
            narrow = narrowest(least, largest)
            if _WIDTHS.get(narrow, 64) < _INTEGERS[dtype]:
                packed = _to_narrow(storage, least, narrow)
                return Coded(self.on, [packed], partial(_from_narrow, dtype, least))
        for narrow in _NARROWER.get(dtype, ()):
            packed = _cast_down(storage, narrow)
            if packed is not None:
                return Coded(self.on, [packed], lambda packed: packed.to(dtype))
        return self.on.put(storage, guard)


def narrowest(least: int, largest: int) -> torch.dtype:
    """Return the smallest integer dtype that spans the range of values.

    Examples:
        >>> narrowest(0, 255), narrowest(-5, 251), narrowest(0, 1 << 40)
        (torch.int8, torch.int16, torch.int64)
    """
    for dtype, bits in _WIDTHS.items():
        if largest - least < 1 << bits:
            return dtype
    return torch.int64


def _to_narrow(storage: Tensor, least: int, narrow: torch.dtype) -> Tensor:
    # Maps the least value to the dtype's minimum.
    return (storage.to(torch.int64) - least + torch.iinfo(narrow).min).to(narrow)


def _from_narrow(dtype: torch.dtype, least: int, packed: Tensor) -> Tensor:
    start = torch.iinfo(packed.dtype).min
    return (packed.to(torch.int64) - start + least).to(dtype)


def _is_zeros_and_ones(storage: Tensor) -> bool:
    """Return whether all bytes are 0 or 1.

    A boolean may have any byte, as `mask.view(torch.bool)` of an image mask of 0 and
    255 has. Other users of the storage may read the bytes.
    """
    return storage.numel() == 0 or int(storage.view(torch.uint8).amax()) <= 1


def _to_bits(storage: Tensor) -> Tensor:
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=storage.device)
    return (in_blocks(storage, 8) * weights).sum(1, dtype=torch.uint8)


def _from_bits(length: int, packed: Tensor) -> Tensor:
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(1) & weights).view(-1)[:length] != 0


def _cast_down(storage: Tensor, narrow: torch.dtype) -> Tensor | None:
    """Return the numbers in a narrower dtype, or None if that is lossy."""
    if not _fits(storage[:_GLANCE], narrow) or not _fits(storage, narrow):
        return None
    return storage.to(narrow)


def _fits(storage: Tensor, narrow: torch.dtype) -> bool:
    bits = _SAME_SIZE[storage.dtype]
    there_and_back = storage.to(narrow).to(storage.dtype)
    return torch.equal(there_and_back.view(bits), storage.view(bits))

"""Fingerprints: a few integers on the device that stand for a tensor's bits."""

import math

import torch
from torch import Tensor

from recoup.backend.storages import is_dense

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> Tensor:
    """Return three integers that depend on every bit of the tensor and its place.

    The bits, read as integers, are laid out as a matrix and summed along both sides;
    the sums are weighted by position and summed again. Equal tensors give equal
    fingerprints; a changed or moved element changes them. Costs two passes over the
    tensor and temporary memory of about the square root of its size; never
    synchronises.

    Examples:
        >>> a = torch.tensor([True, False]), torch.tensor([False, True])
        >>> bool((fingerprint(a[0]) != fingerprint(a[1])).any())
        True
    """
    bits = _as_integers(tensor)
    length = bits.numel()
    side = math.isqrt(length)
    if side == 0:
        return torch.zeros(3, dtype=torch.int64, device=tensor.device)
    rows = length // side
    square = bits[: rows * side].view(rows, side)
    return torch.stack(
        [
            _weighted(square.sum(0, dtype=torch.int64)),
            _weighted(square.sum(1, dtype=torch.int64)),
            _weighted(bits[rows * side :].to(torch.int64)),
        ]
    )


def _weighted(sums: Tensor) -> Tensor:
    places = torch.arange(sums.numel(), device=sums.device)
    # An odd multiplier for every place; int64 wraps around, which is harmless.
    return (sums * (places * 0x9E3779B97F4A7C2 + 0x632BE5)).sum()


def _as_integers(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.size(dimension) > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if is_dense(tensor):
        tensor = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    else:
        tensor = tensor.contiguous().view(-1)
    return tensor.view(_INTEGERS[tensor.element_size()])

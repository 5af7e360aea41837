"""Fingerprints: a few integers on the device that stand for a tensor's bits."""

import torch
from torch import Tensor

from recoup.backend.storages import is_dense

_BLOCK = 1 << 20
_GOLDEN = -7046029254386353131
_MIXER = -4658895280553007687

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> Tensor:
    """Return one integer on the device that stands for a tensor's bits.

    The bits, read as integers, are multiplied by a pseudo-random number for their place
    and summed, modulo 2**64. Equal tensors give equal fingerprints; a changed or moved
    element gives another one, but for a chance of about 2**-64. (`torch.hash_tensor`
    knows no places: it takes a dropout mask for any other with as many ones.)

    Costs two passes over the tensor, in blocks of a million elements; never
    synchronises.

    Examples:
        >>> a = torch.tensor([True, False, False, True])
        >>> bool(fingerprint(a) == fingerprint(~a))
        False
        >>> bool(fingerprint(a) == fingerprint(a.clone()))
        True
    """
    bits = _as_integers(tensor)
    weights = _weights(min(bits.numel(), _BLOCK), tensor.device)
    blocks = [
        (block.to(torch.int64) * weights[: block.numel()]).sum()
        for block in bits.split(_BLOCK)
    ]
    sums = torch.stack(blocks)
    return (sums * _weights(len(blocks), tensor.device)).sum()


def _weights(count: int, device: torch.device) -> Tensor:
    """Return an odd pseudo-random number for each place (the mixer of SplitMix64)."""
    places = torch.arange(1, count + 1, device=device) * _GOLDEN
    places = (places ^ (places >> 30)) * _MIXER
    return (places ^ (places >> 27)) | 1


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

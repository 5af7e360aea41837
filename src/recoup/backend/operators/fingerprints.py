"""Fingerprints: a few integers on the device that stand for a tensor's bits."""

import threading

import torch
from torch import Tensor

from recoup.backend.memory.storages import is_dense

_BLOCK = 1 << 21
_LEAST_BLOCK = 1 << 11
_PARTS = 16
_PLACES = 1
_BLOCKS = 1 << 40  # beyond any place, so that no weight serves both
_GOLDEN = -7046029254386353131
_MIXER = -4658895280553007687

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class _Thread(threading.local):
    is_fingerprinting = False


_THREAD = _Thread()


def is_fingerprinting() -> bool:
    """Return whether the operators that run on this thread now make a fingerprint."""
    return _THREAD.is_fingerprinting


def fingerprint(tensor: Tensor) -> Tensor:
    """Return one integer on the device that stands for a tensor's bits.

    The bits, read as integers of up to four bytes, are multiplied by an odd
    pseudo-random number for their place in a block and summed; the sums of the blocks
    are multiplied by an odd pseudo-random number for the block and summed, all modulo
    2**64. Equal tensors give equal fingerprints. Any other tensor of the same size
    (changed, swapped or permuted elements) gives another one, but for a chance of
    2**-25 at most. (`torch.hash_tensor` ignores positions: it takes a dropout mask for
    any other with as many ones.)

    The bound: let d be the differences of one changed block and 2**k, k < 32, the
    largest power of two that divides them all: they are below 2**32. With independent,
    uniform odd weights w, the sum s of d * w is a multiple of 2**(m + 1), for m >= k,
    with a chance of at most 2**(k - m): one d is 2**k times an odd number, and its
    weight takes 2**(m - k) odd values modulo 2**(m - k + 1), one of which at most
    fits. If 2**m is the largest power that divides s, then v * s, with an odd weight v
    for the block, takes 2**(63 - m) values, one of which cancels the other blocks. So
    the chance is at most 2**(k - 63) for m = k, 2**(k - m + 1) * 2**(m - 63) for each
    m from k + 1 to 63, and 2**(k - 63) for s = 0; in all (64 - k) * 2**(k - 62), which
    is largest for k = 31: 33 * 2**-31.

    The weights are fixed numbers that stand for drawn ones; the tests count how often
    they cancel. With one sequence for w and v they would not be independent: swapping
    the second place of the first block with the first place of the second would change
    nothing.

    Costs two passes over the tensor, in two blocks or more, of two million integers at
    most, and the memory that `fingerprint_bytes` returns; never synchronises.

    Examples:
        >>> a = torch.tensor([True, False, False, True])
        >>> bool(fingerprint(a) == fingerprint(~a))
        False
        >>> bool(fingerprint(a) == fingerprint(a.clone()))
        True
    """
    _THREAD.is_fingerprinting = True
    try:
        return _fingerprint(tensor)
    finally:
        _THREAD.is_fingerprinting = False


def _fingerprint(tensor: Tensor) -> Tensor:
    flat = _flat(tensor)
    width = _width(flat.nbytes)
    length = _length(flat, width)
    count = min(length, flat.numel()) * flat.element_size() // width
    weights = _weights(_PLACES, count, tensor.device)
    sums = [
        (bits * weights[: bits.numel()]).sum()
        for bits in (_integers(block, width) for block in flat.split(length))
    ]
    return (torch.stack(sums) * _weights(_BLOCKS, len(sums), tensor.device)).sum()


def fingerprint_bytes(nbytes: int) -> int:
    """Return what a fingerprint of a tensor of so many bytes takes while it is made.

    A quarter of the tensor where that is large, and at most 32 MiB.

    Examples:
        >>> fingerprint_bytes(64 << 20) >> 20, fingerprint_bytes(8 << 30) >> 20
        (16, 32)
    """
    # The weights and the products of one block, eight bytes each.
    return 16 * _block_integers(nbytes // _width(nbytes))


def _block_integers(integers: int) -> int:
    """Return how many integers make a block: few, for the memory of their weights."""
    half = -(-integers // 2)
    return min(half, max(_LEAST_BLOCK, -(-integers // _PARTS)), _BLOCK)


def _weights(begin: int, count: int, device: torch.device) -> Tensor:
    """Return odd pseudo-random numbers (the mixer of SplitMix64), from one on."""
    places = torch.arange(begin, begin + count, device=device).mul_(_GOLDEN)
    places.bitwise_xor_(places >> 30).mul_(_MIXER)
    return places.bitwise_xor_(places >> 27).bitwise_or_(1)


def _length(flat: Tensor, width: int) -> int:
    """Return how many elements of a row make a block."""
    element_bytes = flat.element_size()
    group = max(1, width // element_bytes)  # elements that are whole integers
    integers = _block_integers(flat.nbytes // width)
    return max(group, -(-integers * width // (element_bytes * group)) * group)


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements in one row, each once."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.size(dimension) > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return tensor.contiguous().view(-1)


def _width(nbytes: int) -> int:
    """Return how many bytes of a row of so many are read as one integer.

    Few wide ones are read faster than many narrow ones, but not eight: times an odd
    number, their highest bit is the same everywhere, so two changed signs would cancel.
    The width depends on the size alone, so that equal tensors are read alike wherever
    they lie.
    """
    return next(width for width in (4, 2, 1) if nbytes % width == 0)


def _integers(block: Tensor, width: int) -> Tensor:
    begin_bytes = block.storage_offset() * block.element_size()
    aligned = block if begin_bytes % width == 0 else block.clone()
    return aligned.view(_INTEGERS[width])

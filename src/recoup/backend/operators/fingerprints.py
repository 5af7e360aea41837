"""Fingerprints: 64-bit hashes of tensors' bits, computed on the device."""

import threading
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from recoup.backend.memory.storages import (
    has_contents,
    has_storage,
    is_dense,
    without_repeats,
)
from recoup.core.restoring import restoring

_BLOCK = 1 << 21
_LEAST_BLOCK = 1 << 11
_PARTS = 16
_LEAST_CHUNK = 1 << 5
_CHUNKS = 1 << 8
_PRODUCT_BYTES = 16  # the weight of an integer, and their product
_COPY_BYTES = 4
_PLACES = 1
_BLOCKS = 1 << 40  # beyond any place, so that places and blocks share no weight
_GOLDEN = -7046029254386353131
_MIXER = -4658895280553007687

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class _Thread(threading.local):
    is_fingerprinting = False


_THREAD = _Thread()


def is_fingerprinting() -> bool:
    """Return whether this thread is computing a fingerprint."""
    return _THREAD.is_fingerprinting


def is_written(tensor: Tensor) -> bool:
    """Return whether a saved tensor has contents without uninitialised parts.

    uint8 tensors are workspaces with padding (oneDNN's), never activations. On an
    accelerator, attention without dropout saves an unwritten seed and offset.
    """
    if not (has_storage(tensor) and has_contents(tensor)):
        return False
    is_integer = tensor.dtype in (torch.int64, torch.uint64)
    is_seed = is_integer and tensor.numel() <= 2 and tensor.device.type != "cpu"
    return not is_seed and tensor.dtype != torch.uint8


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a 64-bit hash of a tensor's bits, on its device.

    The bits, read as integers of up to four bytes, are multiplied by an odd
    pseudo-random number for their place in a block and summed; the sums of the blocks
    are multiplied by an odd pseudo-random number for the block and summed, all modulo
    2**64. Equal tensors give equal fingerprints. Any other tensor of the same size
    (changed, swapped or permuted elements) collides with probability 2**-25 at most.
    (`torch.hash_tensor` ignores positions: dropout masks with equally many ones
    collide.)

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

    The weights are fixed instead of drawn; the tests count how often they cancel. With
    one sequence for w and v they would not be independent: swapping the second place of
    the first block with the first place of the second would change nothing.

    Costs two passes over the tensor, in two blocks or more, of two million integers at
    most, and the memory that `fingerprint_bytes` returns, or less where
    `fingerprints_within` limits it; never synchronises.

    Examples:
        >>> a = torch.tensor([True, False, False, True])
        >>> bool(fingerprint(a) == fingerprint(~a))
        False
        >>> bool(fingerprint(a) == fingerprint(a.clone()))
        True
    """
    with restoring(_end_fingerprint):
        _THREAD.is_fingerprinting = True
        return _fingerprint(tensor)


def _end_fingerprint() -> None:
    _THREAD.is_fingerprinting = False


class _Room:
    """The memory that fingerprints may use; None for no limit.

    Process-wide, because backward runs on other threads.
    """

    def __init__(self) -> None:
        self.free_bytes: Callable[[], int] | None = None


_ROOM = _Room()


class _Limiting(restoring):
    """Limits the memory of fingerprints in the block."""

    __slots__ = ("_free_bytes",)

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        super().__init__(partial(setattr, _ROOM, "free_bytes", _ROOM.free_bytes))
        self._free_bytes = free_bytes

    def __enter__(self) -> None:
        super().__enter__()
        _ROOM.free_bytes = self._free_bytes


def fingerprints_within(free_bytes: Callable[[], int]) -> restoring:
    """Limit the memory of fingerprints in the block to the free bytes.

    They take at least `least_fingerprint_bytes`. The limit does not change the result,
    and an interrupt leaves none behind.

    Args:
        free_bytes: Callback that returns the free bytes.

    Examples:
        >>> a = torch.arange(100_000)
        >>> with fingerprints_within(lambda: 10_000):
        ...     narrow = fingerprint(a)
        >>> bool(narrow == fingerprint(a))
        True
    """
    return _Limiting(free_bytes)


def _fingerprint(tensor: Tensor) -> Tensor:
    elements = _elements(tensor)
    if not elements.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    width = _width(elements.nbytes)
    length = _length(elements, width)
    blocks = -(-elements.numel() // length)
    chunk = _chunk(elements, width, length)
    if chunk >= length:
        sums = torch.stack(list(_sums(elements, width, length, 0, length)))
        return _combined(sums)
    totals = torch.zeros(blocks, dtype=torch.int64, device=tensor.device)
    for begin in range(0, length, chunk):
        end = min(begin + chunk, length)
        sums = torch.stack(list(_sums(elements, width, length, begin, end)))
        totals[: len(sums)] += sums
    return _combined(totals)


def _sums(
    elements: Tensor, width: int, length: int, begin: int, end: int
) -> Iterator[Tensor]:
    """Yield, for each block, the sum over its elements from `begin` to `end`."""
    step_bytes = elements.element_size()
    count = (min(end, elements.numel()) - begin) * step_bytes // width
    first = _PLACES + begin * step_bytes // width
    weights = _weights(first, count, elements.device)
    for block in range(0, elements.numel(), length):
        stop = min(block + end, elements.numel())
        if block + begin < stop:
            bits = _integers(_run(elements, block + begin, stop), width)
            if len(bits) < len(weights):
                weights = weights[: len(bits)]
            yield (bits * weights).sum()


def _combined(sums: Tensor) -> Tensor:
    """Return the weighted sum of all blocks' sums."""
    return (sums * _weights(_BLOCKS, len(sums), sums.device)).sum()


def fingerprint_bytes(nbytes: int) -> int:
    """Return the workspace of a fingerprint of a tensor of `nbytes`.

    A quarter of the tensor if that is large, and at most 32 MiB. With limited memory it
    takes less: see `least_fingerprint_bytes`.

    Examples:
        >>> fingerprint_bytes(64 << 20) >> 20, fingerprint_bytes(8 << 30) >> 20
        (16, 32)
    """
    return _PRODUCT_BYTES * _block_integers(nbytes // _width(nbytes))


def least_fingerprint_bytes(nbytes: int, *, scalar_bytes: int = 8) -> int:
    """Return the smallest workspace of a fingerprint.

    Args:
        nbytes: The size of the tensor.
        scalar_bytes: The bytes that the device allocates for one number.

    Examples:
        >>> least_fingerprint_bytes(1 << 20), least_fingerprint_bytes(1 << 30) >> 10
        (21016, 20484)
    """
    integers = nbytes // _width(nbytes)
    blocks = -(-integers // max(1, _block_integers(integers)))
    chunk = min(_least_chunk(integers), _block_integers(integers))
    return (_PRODUCT_BYTES + _COPY_BYTES) * chunk + _scalar_bytes(blocks, scalar_bytes)


def _scalar_bytes(blocks: int, each_bytes: int = 8) -> int:
    """Return the bytes of the blocks' sums, totals, weights and products."""
    return each_bytes * (blocks + 3) + 3 * 8 * blocks


def _least_chunk(integers: int) -> int:
    """Return the fewest integers to read at once, to bound launch overhead."""
    return max(_LEAST_CHUNK, integers // _CHUNKS)


def _chunk(elements: Tensor, width: int, length: int) -> int:
    """Return how many elements of a block to read at once."""
    size = elements.element_size()
    room_bytes = _PRODUCT_BYTES * length * size // width
    if _ROOM.free_bytes is not None:
        blocks = -(-elements.numel() // length)
        room_bytes = min(room_bytes, _ROOM.free_bytes() - _scalar_bytes(blocks))
    is_aligned = elements.storage_offset() * size % width == 0
    is_row = elements.dim() == 1 and elements.stride(0) == 1 and is_aligned
    each_bytes = _PRODUCT_BYTES + (0 if is_row else _COPY_BYTES)
    integers = max(room_bytes // each_bytes, _least_chunk(elements.nbytes // width))
    group = max(1, width // size)  # elements that are whole integers
    return max(group, integers * width // size // group * group)


def _block_integers(integers: int) -> int:
    """Return the integers per block: few, because their weights take memory."""
    half = -(-integers // 2)
    return min(half, max(_LEAST_BLOCK, -(-integers // _PARTS)), _BLOCK)


def _weights(begin: int, count: int, device: torch.device) -> Tensor:
    """Return numbers `begin` and following of an odd sequence (SplitMix64's mixer)."""
    places = torch.arange(begin, begin + count, device=device).mul_(_GOLDEN)
    places.bitwise_xor_(places >> 30).mul_(_MIXER)
    return places.bitwise_xor_(places >> 27).bitwise_or_(1)


def _length(elements: Tensor, width: int) -> int:
    """Return the elements per block."""
    element_bytes = elements.element_size()
    group = max(1, width // element_bytes)  # elements that are whole integers
    integers = _block_integers(elements.nbytes // width)
    return max(group, -(-integers * width // (element_bytes * group)) * group)


def _elements(tensor: Tensor) -> Tensor:
    """Return the elements without repeats, flat if that takes no copy."""
    tensor = without_repeats(tensor.detach().resolve_conj().resolve_neg())
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return tensor


def _run(tensor: Tensor, begin: int, end: int) -> Tensor:
    """Return a range of elements in row-major order, flat."""
    if tensor.dim() == 1 and tensor.stride(0) == 1:
        return tensor[begin:end]
    row = tensor.new_empty(end - begin)
    _copy(tensor, begin, row)
    return row


def _copy(tensor: Tensor, begin: int, row: Tensor) -> None:
    """Fill a row with the elements that follow `begin`."""
    if tensor.dim() == 1:
        row.copy_(tensor[begin : begin + row.numel()])
        return
    inner = tensor[0].numel()
    first, offset = divmod(begin, inner)
    if offset or row.numel() < inner:
        head = min(inner - offset, row.numel())
        _copy(tensor[first], offset, row[:head])
        if head < row.numel():
            _copy(tensor, begin + head, row[head:])
        return
    whole = row.numel() // inner
    middle = tensor[first : first + whole]
    row[: whole * inner].view(middle.shape).copy_(middle)
    if whole * inner < row.numel():
        _copy(tensor, begin + whole * inner, row[whole * inner :])


def _width(nbytes: int) -> int:
    """Return how many bytes of `nbytes` are read as one integer.

    Wide integers are faster, but not eight bytes: an odd factor keeps their highest
    bit, so two changed signs would cancel. The width depends on the size alone, so that
    equal tensors get equal fingerprints whatever their offset.
    """
    return next(width for width in (4, 2, 1) if nbytes % width == 0)


def _integers(block: Tensor, width: int) -> Tensor:
    begin_bytes = block.storage_offset() * block.element_size()
    aligned = block if begin_bytes % width == 0 else block.clone()
    return aligned.view(_INTEGERS[width])

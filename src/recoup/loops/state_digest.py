"""Digests of states, to compare a recomputed state with the first one."""

import hashlib
import struct
from typing import Any

import torch
from torch import Tensor

from recoup.backend.memory.pinned import memory_of
from recoup.backend.memory.storages import has_storage
from recoup.backend.operators.fingerprints import fingerprint


class StateDigest:
    """The bits of a state, or the state itself if a tolerance is allowed.

    On the CPU the bits are hashed immediately; on an accelerator they become a few
    integers that stay there until they are compared, so that nothing waits.

    Args:
        leaves: The leaves of the state.
        tolerance: The relative and absolute difference allowed. None requires equal
            bits and holds no state.
    """

    def __init__(self, leaves: list[Any], tolerance: float | None = None) -> None:
        self._tolerance = tolerance
        self._marks = [_mark(leaf, tolerance) for leaf in leaves]

    def differs(self, leaves: list[Any]) -> list[Any]:
        """Return claims that the leaves differ: booleans, some on the device."""
        if len(leaves) != len(self._marks):
            return [True]
        found: list[Any] = []
        for mark, leaf in zip(self._marks, leaves, strict=True):
            found.append(_differs(mark, leaf, self._tolerance))
        return found


def _mark(leaf: Any, tolerance: float | None) -> Any:
    if not isinstance(leaf, Tensor):
        if tolerance is not None:
            return leaf
        if isinstance(leaf, (float, complex)):  # NumPy's scalars are of these types too
            return struct.pack("dd", leaf.real, leaf.imag)
        if not hasattr(leaf, "tobytes"):
            return leaf
        return hashlib.blake2b(leaf.tobytes(), digest_size=16).digest(), leaf.shape
    if tolerance is not None:
        return leaf.detach()
    if not has_storage(leaf):
        return None
    if leaf.device.type != "cpu":
        return fingerprint(leaf)
    return _digest(leaf)


def _differs(mark: Any, leaf: Any, tolerance: float | None) -> Any:
    if mark is None:
        return False
    if tolerance is not None and isinstance(leaf, Tensor):
        if mark.shape != leaf.shape or mark.dtype != leaf.dtype:
            return True
        return not torch.allclose(
            mark, leaf.detach(), rtol=tolerance, atol=tolerance, equal_nan=True
        )
    if tolerance is not None and _is_number(leaf):
        return not _is_close(mark, leaf, tolerance)
    now = _mark(leaf, None)
    if isinstance(now, Tensor) and isinstance(mark, Tensor):
        return now != mark
    return now is not mark and bool(now != mark)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (float, complex)) or hasattr(leaf, "tobytes")


def _is_close(mark: Any, leaf: Any, tolerance: float) -> bool:
    if getattr(mark, "shape", ()) != getattr(leaf, "shape", ()):
        return False
    near = abs(mark - leaf) <= tolerance * (1 + abs(leaf))
    both_nan = (mark != mark) & (leaf != leaf)  # only NaN differs from itself
    close = near | both_nan
    return bool(close.all() if hasattr(close, "all") else close)


def _digest(leaf: Tensor) -> tuple[bytes, torch.Size, torch.dtype]:
    whole = leaf.detach()
    if whole.is_conj() or whole.is_neg():
        whole = whole.resolve_conj().resolve_neg()
    whole = whole.contiguous()
    seen = hashlib.blake2b(memory_of(whole), digest_size=16).digest()
    return seen, leaf.shape, leaf.dtype

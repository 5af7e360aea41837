"""Earlier contents of external tensors that a region writes to.

An operation may have read a tensor that is overwritten afterwards. Its replay needs the
earlier contents. Only when the region ends is it known whether it is replayed, so until
then the parts that writes are about to overwrite are copied. Afterwards the region
holds only what replays read of earlier contents, each byte once per content.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from recoup.backend.memory.storages import (
    Geometry,
    alias,
    flat,
    geometry_of,
    shaped,
    sharing_versions,
    version_of,
)
from recoup.engine.lifetime.values import Hold, TapeValue
from recoup.engine.recording.intervals import Intervals, hull_of, runs_of

Indices = Sequence[Tensor | None]
"""The indices by which an operator such as `index_put_` addresses its target."""


class _Piece:
    """Earlier contents of a part of a storage.

    Attributes:
        hold: The hold of the contents.
        start: The first byte.
        stop: The byte after the last.
        geometry: The part's geometry, if it is not all bytes from `start` to `stop`.
        indices: The indices of its elements in the geometry, if not all.
    """

    def __init__(
        self,
        contents: Tensor,
        interval: tuple[int, int],
        geometry: Geometry | None = None,
        indices: Indices | None = None,
    ) -> None:
        self.hold = Hold(contents)
        self.start, self.stop = interval
        self.geometry = geometry
        self.indices = indices

    def put_back(self, whole: Tensor) -> None:
        """Write the contents to a one-dimensional tensor of the whole storage."""
        contents = self.hold.fetch("a replay")
        if self.geometry is None:
            width = whole.element_size()
            whole[self.start // width : self.stop // width].copy_(contents)
        elif self.indices is None:
            shaped(whole, self.geometry).copy_(contents)
        else:
            part = shaped(whole, self.geometry)
            torch.ops.aten.index_put_(part, self.indices, contents)

    def narrowed(self, start: int, stop: int) -> "_Piece":
        """Return a copy of the bytes from `start` to `stop`."""
        if (start, stop) == (self.start, self.stop):
            return self
        contents = self.hold.fetch("a replay")
        width = contents.element_size()
        part = contents[(start - self.start) // width : (stop - self.start) // width]
        return _Piece(part.clone(), (start, stop))


class _Storage:
    """A storage as a one-dimensional tensor.

    Attributes:
        now: The storage itself, while the region records.
        base: The needed contents at the end of the region.
    """

    def __init__(self, tensor: Tensor) -> None:
        # An outer region may hold these views, and must detect later writes.
        with sharing_versions():
            self.now: Tensor | None = flat(alias(tensor).detach())
        self.base: list[_Piece] = []
        self._length = self.now.numel()
        self._like = self.now.new_empty(0)
        self.width = self.now.element_size()
        self.nbytes = self._length * self.width

    def copied(self) -> Tensor:
        """Return a tensor of its length, with its contents while the region records."""
        if self.now is None:
            return self._like.new_empty(self._length)
        return self.now[: self._length].clone()

    def piece(self, start: int, stop: int) -> _Piece:
        """Return a copy of some of its bytes."""
        assert self.now is not None, "not after the end"
        with sharing_versions():
            part = self.now[start // self.width : stop // self.width]
        return _Piece(part.clone(), (start, stop))

    def aligned(self, start: int, stop: int) -> tuple[int, int]:
        """Return the interval, extended to whole elements."""
        return start // self.width * self.width, -(-stop // self.width) * self.width


class Version:
    """The contents of a storage before a write.

    Refers to later versions and to no value; values refer to it.

    Attributes:
        pieces: The contents overwritten until the next version.
        later: The next version, if there is one.
    """

    def __init__(self, storage: _Storage) -> None:
        self._storage = storage
        self.pieces: list[_Piece] = []
        self.later: Version | None = None

    def fetch(self) -> Tensor:
        """Return the needed contents as a one-dimensional tensor of the storage."""
        whole = self._storage.copied()
        for piece in reversed(self._all_pieces()):
            piece.put_back(whole)
        return whole

    def holds(self) -> list[Hold]:
        """Return the holds of all pieces of the contents."""
        return [piece.hold for piece in self._all_pieces()]

    def _all_pieces(self) -> list[_Piece]:
        """Return the pieces of this and later versions, to restore in reverse order."""
        found: list[_Piece] = []
        version: Version | None = self
        while version is not None:
            found += version.pieces
            version = version.later
        return found + self._storage.base


class History:
    """Earlier contents of one storage, oldest first."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = _Storage(tensor)
        self._versions: list[tuple[TapeValue, Version]] = []
        self._saved = Intervals()  # since the last version
        self._saved_bytes = 0

    def add(self, value: TapeValue) -> Version:
        """Add the current contents, which operations used, as a version."""
        version = Version(self._storage)
        if self._versions:
            self._versions[-1][1].later = version
        self._versions.append((value, version))
        self._saved = Intervals()
        self._saved_bytes = 0
        return version

    def before_write(self, target: Tensor, indices: Indices | None) -> None:
        """Copy what a write will overwrite, unless the last version has it already."""
        storage, pieces = self._storage, self._versions[-1][1].pieces
        hull = storage.aligned(*hull_of(geometry_of(target)))
        if self._saved.covers(*hull):
            return
        runs = None if indices is not None else runs_of(target)
        if runs is None or len(runs) != 1:
            count = target.numel() if indices is None else _count(target, indices)
            total = self._saved_bytes + count * target.element_size()
            if total <= storage.nbytes:
                self._saved_bytes = total
                pieces.append(_part(target, hull, indices))
                return
            # Copying the rest takes less than another, possibly overlapping part.
            hull = (0, storage.nbytes)
        for start, stop in self._saved.gaps(*hull):
            pieces.append(storage.piece(start, stop))
            self._saved_bytes += stop - start
        self._saved.add(*hull)

    def settle(self, reads: Mapping[TapeValue, Iterable[Geometry]]) -> None:
        """Keep only what replays read of earlier contents."""
        storage = self._storage
        needed = Intervals()
        last: Version | None = None
        for value, version in self._versions:
            pieces, version.pieces = version.pieces, []
            if value in reads:
                for geometry in reads[value]:
                    needed.add(*storage.aligned(*hull_of(geometry)))
                if last is not None:
                    last.later = version
                last = version
            if last is not None:
                # Pieces of an unneeded version belong to the previous one.
                last.pieces += _needed_pieces(pieces, needed)
        if last is not None:
            last.later = None
        storage.base = [storage.piece(start, stop) for start, stop in needed]
        storage.now = None
        self._versions = []


def _needed_pieces(pieces: Iterable[_Piece], needed: Intervals) -> list[_Piece]:
    """Return the needed parts of pieces, and remove them from `needed`."""
    found: list[_Piece] = []
    for piece in pieces:
        parts = needed.within(piece.start, piece.stop)
        if piece.geometry is not None:
            found += [piece] if parts else []
            continue
        for start, stop in parts:
            found.append(piece.narrowed(start, stop))
            needed.remove(start, stop)
    return found


def _part(target: Tensor, hull: tuple[int, int], indices: Indices | None) -> _Piece:
    """Return a copy of the elements of a tensor, or of some of them."""
    with sharing_versions():
        part = alias(target).detach()
    geometry = geometry_of(part)
    if indices is None:
        return _Piece(part.clone(), hull, geometry)
    kept = [None if index is None else index.clone() for index in indices]
    return _Piece(torch.ops.aten.index(part, kept), hull, geometry, kept)


def _count(target: Tensor, indices: Indices) -> int:
    """Return an upper bound on the addressed elements of a target."""
    count, shapes = target.numel(), []
    for place, index in enumerate(indices):
        if index is None:
            continue
        if index.dtype in (torch.bool, torch.uint8):
            return target.numel()  # counting a mask's elements would synchronise
        count //= max(1, target.shape[place])
        shapes.append(index.shape)
    return count * torch.broadcast_shapes(*shapes).numel()


class LateWrites:
    """Finds the writes to saved values that bypass the version counter.

    Autograd increments a tensor's version after the operator that wrote to it. If it
    does not (`rrelu_with_noise`, a write to `.data`), plain autograd's backward sees
    the new contents, so the tensor itself is held.

    Attributes:
        holds: By value, a hold of what plain autograd would see.
    """

    def __init__(self) -> None:
        self.holds: dict[TapeValue, Hold] = {}
        self._pending: list[tuple[TapeValue, Hold]] = []

    def before(self, value: TapeValue, tensor: Tensor) -> None:
        """Record that a saved value is about to be written to, through a tensor."""
        # Prefer the saved tensor itself: `.data` has a separate version counter.
        saved = value.first_tensor()
        hold = Hold(alias(tensor if saved is None else saved), value.geometry)
        self._pending.append((value, hold))

    def settle(self) -> None:
        """Determine which of the writes so far bypassed the version counter."""
        if self._pending:
            for value, hold in self._pending:
                if hold.tensor is not None and version_of(hold.tensor) == hold.version:
                    self.holds[value] = hold
            self._pending = []

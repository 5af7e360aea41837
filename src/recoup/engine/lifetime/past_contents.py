"""The past: earlier contents of tensors from outside that a region writes to.

An operation may have used a tensor that is written to afterwards. Its replay needs what
was there before. Whether it is replayed at all is known when the region ends, so until
then only the parts that writes are about to destroy are copied. From the end on the
region holds what replays read of earlier contents, each byte once for each content.
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
    """A part of a storage as it was.

    Attributes:
        hold: Holds the contents.
        start: The first byte.
        stop: The byte after the last.
        geometry: How the part lies in the storage if that is not all from `start` to
            `stop`.
        indices: Which elements of that they are, if not all.
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
        """Write the contents to a tensor that is a storage in one dimension."""
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
        """Return the part of it from one byte to another, in memory of its own."""
        if (start, stop) == (self.start, self.stop):
            return self
        contents = self.hold.fetch("a replay")
        width = contents.element_size()
        part = contents[(start - self.start) // width : (stop - self.start) // width]
        return _Piece(part.clone(), (start, stop))


class _Storage:
    """A storage in one dimension.

    Attributes:
        now: The storage itself, while the region records.
        base: The contents at the end of the region, as far as needed.
    """

    def __init__(self, tensor: Tensor) -> None:
        # A region around this one may hold them: it has to see later writes.
        with sharing_versions():
            self.now: Tensor | None = flat(alias(tensor).detach())
        self.base: list[_Piece] = []
        self._length = self.now.numel()
        self._like = self.now.new_empty(0)
        self.width = self.now.element_size()
        self.nbytes = self._length * self.width

    def copied(self) -> Tensor:
        """Return a tensor of its length, with its contents if these are there."""
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
        """Return the bytes with those of elements that are only partly among them."""
        return start // self.width * self.width, -(-stop // self.width) * self.width


class Version:
    """The contents of a storage while a region used it, before a write.

    It refers to later versions and to no value: a value refers to it.

    Attributes:
        pieces: The contents destroyed until the next version.
        later: The next version, if there is one.
    """

    def __init__(self, storage: _Storage) -> None:
        self._storage = storage
        self.pieces: list[_Piece] = []
        self.later: Version | None = None

    def fetch(self) -> Tensor:
        """Return the contents in one dimension, as far as they are needed."""
        whole = self._storage.copied()
        for piece in reversed(self._all_pieces()):
            piece.put_back(whole)
        return whole

    def holds(self) -> list[Hold]:
        """Return the holds of all that the contents are put together from."""
        return [piece.hold for piece in self._all_pieces()]

    def _all_pieces(self) -> list[_Piece]:
        """Return the pieces of this and later versions; the last is put back first."""
        found: list[_Piece] = []
        version: Version | None = self
        while version is not None:
            found += version.pieces
            version = version.later
        return found + self._storage.base


class History:
    """Earlier contents of one storage, the oldest first."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = _Storage(tensor)
        self._versions: list[tuple[TapeValue, Version]] = []
        self._saved = Intervals()  # since the last version
        self._saved_bytes = 0

    def add(self, value: TapeValue) -> Version:
        """Take the present contents, which operations used, for a version."""
        version = Version(self._storage)
        if self._versions:
            self._versions[-1][1].later = version
        self._versions.append((value, version))
        self._saved = Intervals()
        self._saved_bytes = 0
        return version

    def before_write(self, target: Tensor, indices: Indices | None) -> None:
        """Copy what a write will destroy, unless that was done for the last version."""
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
            # All that is left is less than another part that may overlap.
            hull = (0, storage.nbytes)
        for start, stop in self._saved.gaps(*hull):
            pieces.append(storage.piece(start, stop))
            self._saved_bytes += stop - start
        self._saved.add(*hull)

    def settle(self, reads: Mapping[TapeValue, Iterable[Geometry]]) -> None:
        """Hold what replays read of earlier contents, and nothing else."""
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
                # Those of a version that is not needed belong to the one before.
                last.pieces += _needed_pieces(pieces, needed)
        if last is not None:
            last.later = None
        storage.base = [storage.piece(start, stop) for start, stop in needed]
        storage.now = None
        self._versions = []


def _needed_pieces(pieces: Iterable[_Piece], needed: Intervals) -> list[_Piece]:
    """Return what is needed of some pieces, and take it out of what is needed."""
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
    """Return how many elements of a target are addressed, or all of them."""
    count, shapes = target.numel(), []
    for place, index in enumerate(indices):
        if index is None:
            continue
        if index.dtype in (torch.bool, torch.uint8):
            return target.numel()  # how many are set would have to be asked
        count //= max(1, target.shape[place])
        shapes.append(index.shape)
    return count * torch.broadcast_shapes(*shapes).numel()


class LateWrites:
    """Finds the writes to saved values that did not count as a new version.

    Autograd gives a tensor its new version after the operator that wrote to it. Where
    it does not (`rrelu_with_noise`, a write to `.data`), plain autograd shows backward
    the new contents, so the tensor is held as it is.

    Attributes:
        holds: By value, what plain autograd would find there now.
    """

    def __init__(self) -> None:
        self.holds: dict[TapeValue, Hold] = {}
        self._pending: list[tuple[TapeValue, Hold]] = []

    def before(self, value: TapeValue, tensor: Tensor) -> None:
        """Record that a saved value is about to be written to, through a tensor."""
        # The tensor that was saved, if it is there: `.data` has versions of its own.
        saved = value.first_tensor()
        hold = Hold(alias(tensor if saved is None else saved), value.geometry)
        self._pending.append((value, hold))

    def settle(self) -> None:
        """Find out which of the writes so far counted."""
        if self._pending:
            for value, hold in self._pending:
                if hold.tensor is not None and version_of(hold.tensor) == hold.version:
                    self.holds[value] = hold
            self._pending = []

"""The past: earlier contents of tensors from outside that a region writes to.

An operation may have used a tensor that is written to afterwards. Its replay needs what
was there before. Whether it is replayed at all is known when the region ends, so until
then only the parts that writes are about to destroy are copied. From the end on the
region holds what replays read of earlier contents, each byte once for each content.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from recoup.backend.storages import Geometry, alias, flat, geometry_of, shaped
from recoup.engine.intervals import Intervals, hull_of, runs_of
from recoup.engine.values import Hold, Value

Indices = Sequence[Tensor | None]
"""What an operator such as `index_put_` addresses its target by."""


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
        stretch: tuple[int, int],
        geometry: Geometry | None = None,
        indices: Indices | None = None,
    ) -> None:
        self.hold = Hold(contents)
        self.start, self.stop = stretch
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


class Version:
    """The contents of a storage while a region used it, before a write.

    Args:
        history: The storage's history.
        value: Stands for the contents on the tape.
    """

    def __init__(self, history: "History", value: Value) -> None:
        self._history = history
        self.value = value
        self.pieces: list[_Piece] = []

    def fetch(self) -> Tensor:
        """Return the contents in one dimension, as far as they are needed."""
        return self._history.contents_of(self)

    def holds(self) -> list[Hold]:
        """Return the holds of all that the contents are put together from."""
        return [piece.hold for piece in self._history.pieces_of(self)]


class History:
    """Earlier contents of one storage, the oldest first.

    Args:
        tensor: A tensor of the storage that is about to be written to.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._now: Tensor | None = flat(alias(tensor).detach())
        self._length = self._now.numel()
        self._blank = self._now.new_empty(0)
        self._versions: list[Version] = []
        self._saved = Intervals()  # since the last version
        self._saved_bytes = 0
        self._base: list[_Piece] = []

    def add(self, value: Value) -> Version:
        """Take the present contents, which operations used, for a version."""
        version = Version(self, value)
        self._versions.append(version)
        self._saved = Intervals()
        self._saved_bytes = 0
        return version

    def before_write(self, target: Tensor, indices: Indices | None) -> None:
        """Copy what a write will destroy, unless that was done for the last version."""
        hull = self._aligned(*hull_of(geometry_of(target)))
        if self._saved.covers(*hull):
            return
        runs = None if indices is not None else runs_of(target)
        is_dense = runs is not None and len(runs) == 1
        if not is_dense:
            count = target.numel() if indices is None else _count(target, indices)
            nbytes = count * target.element_size()
            total = self._saved_bytes + nbytes
            if total <= self._length * self._blank.element_size():
                self._saved_bytes = total
                self._save_part(target, hull, indices)
                return
            # All that is left is less than another part that may overlap.
            hull = (0, self._length * self._blank.element_size())
        assert self._now is not None, "not after the end"
        width = self._blank.element_size()
        for start, stop in self._saved.gaps(*hull):
            part = self._now[start // width : stop // width]
            self._versions[-1].pieces.append(_Piece(part.clone(), (start, stop)))
            self._saved_bytes += stop - start
        self._saved.add(*hull)

    def settle(self, reads: Mapping[Value, Iterable[Geometry]]) -> None:
        """Hold what replays read of earlier contents, and nothing else.

        Args:
            reads: The versions that are needed, by value, with what is read of them.
        """
        assert self._now is not None, "not after the end"
        needed = Intervals()
        held: list[Version] = []
        for version in self._versions:
            if version.value in reads:
                held.append(version)
                for geometry in reads[version.value]:
                    needed.add(*self._aligned(*hull_of(geometry)))
            pieces, version.pieces = version.pieces, []
            if held:
                # Those of a version that is not needed belong to the one before.
                held[-1].pieces += self._settle_pieces(pieces, needed)
        width = self._blank.element_size()
        self._base = [
            _Piece(self._now[start // width : stop // width].clone(), (start, stop))
            for start, stop in needed
        ]
        self._versions = held
        self._now = None

    def contents_of(self, version: Version) -> Tensor:
        """Return the contents of a version in one dimension."""
        if self._now is None:
            whole = self._blank.new_empty(self._length)
        else:
            whole = self._now[: self._length].clone()
        for piece in reversed(self.pieces_of(version)):
            piece.put_back(whole)
        return whole

    def pieces_of(self, version: Version) -> list[_Piece]:
        """Return the pieces of a version; the first to be put back is the last."""
        place = self._versions.index(version)
        found = [piece for v in self._versions[place:] for piece in v.pieces]
        return found + self._base

    def _settle_pieces(
        self, pieces: list[_Piece], needed: Intervals
    ) -> Iterable[_Piece]:
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

    def _save_part(
        self, target: Tensor, hull: tuple[int, int], indices: Indices | None
    ) -> None:
        part = alias(target).detach()
        shape, stride, offset = tuple(part.shape), part.stride(), part.storage_offset()
        geometry = (shape, stride, int(offset), part.dtype, 0)
        if indices is None:
            contents, kept = part.clone(), None
        else:
            kept = [None if index is None else index.clone() for index in indices]
            contents = torch.ops.aten.index(part, kept)
        self._versions[-1].pieces.append(_Piece(contents, hull, geometry, kept))

    def _aligned(self, start: int, stop: int) -> tuple[int, int]:
        """Return the bytes with those of elements that are only partly among them."""
        width = self._blank.element_size()
        return start // width * width, -(-stop // width) * width


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

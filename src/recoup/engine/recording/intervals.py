"""Sets of byte intervals of a storage."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import product

from torch import Tensor

from recoup.backend.memory.storages import Geometry

_MOST_RUNS = 1024


class Intervals:
    """A set of bytes of a storage, as disjoint intervals.

    Examples:
        >>> filled = Intervals()
        >>> filled.add(0, 4), filled.add(8, 12), filled.add(4, 8)
        (None, None, None)
        >>> filled.covers(2, 12), filled.gaps(10, 16)
        (True, [(12, 16)])
    """

    __slots__ = ("_bounds",)

    def __init__(self) -> None:
        self._bounds: list[int] = []  # alternating starts and stops

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Iterate over the intervals in order."""
        bounds = self._bounds
        return zip(bounds[::2], bounds[1::2], strict=True)

    def add(self, start: int, stop: int) -> None:
        """Add the bytes from `start` to `stop`."""
        if start < stop:
            self._replace(start, stop, inside=0)

    def remove(self, start: int, stop: int) -> None:
        """Remove the bytes from `start` to `stop`."""
        if start < stop:
            self._replace(start, stop, inside=1)

    def covers(self, start: int, stop: int) -> bool:
        """Return whether all bytes from `start` to `stop` are in the set."""
        place = bisect_right(self._bounds, start)
        return stop <= start or (place % 2 == 1 and stop <= self._bounds[place])

    def within(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the intersection with the interval from `start` to `stop`."""
        bounds = self._bounds
        first = bisect_right(bounds, start) // 2 * 2
        last = bisect_left(bounds, stop)
        pairs = zip(bounds[first:last:2], bounds[first + 1 : last + 1 : 2], strict=True)
        return [(max(a, start), min(b, stop)) for a, b in pairs if b > start]

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the gaps in the set from `start` to `stop`."""
        found: list[tuple[int, int]] = []
        for a, b in self.within(start, stop):
            if start < a:
                found.append((start, a))
            start = b
        if start < stop:
            found.append((start, stop))
        return found

    def _replace(self, start: int, stop: int, *, inside: int) -> None:
        bounds = self._bounds
        first, last = bisect_left(bounds, start), bisect_right(bounds, stop)
        new = [start] if first % 2 == inside else []
        if last % 2 == inside:
            new.append(stop)
        bounds[first:last] = new


def runs_of(tensor: Tensor) -> list[tuple[int, int]] | None:
    """Return the byte intervals of a storage that a tensor's elements occupy.

    Returns:
        None if there are too many to handle.

    Examples:
        >>> import torch
        >>> runs_of(torch.zeros(2, 8)[:, 2:4])
        [(8, 16), (40, 48)]
    """
    if tensor.numel() == 0:
        return []
    dims = sorted(
        (stride, size)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1 and stride > 0
    )
    length = 1
    while dims and dims[0][0] <= length:
        stride, size = dims.pop(0)
        length = max(length, stride * (size - 1) + length)
    count = 1
    for _, size in dims:
        count *= size
    if count > _MOST_RUNS:
        return None
    width, offset = tensor.element_size(), int(tensor.storage_offset())
    steps = [range(0, stride * size, stride) for stride, size in reversed(dims)]
    starts = (offset + sum(step) for step in product(*steps))
    return [(start * width, (start + length) * width) for start in starts]


def hull_of(geometry: Geometry) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after its last.

    Examples:
        >>> import torch
        >>> from recoup.backend.memory.storages import geometry_of
        >>> hull_of(geometry_of(torch.zeros(4, 4)[1:3, 1]))
        (20, 40)
    """
    shape, strides, start, dtype, _ = geometry
    width = dtype.itemsize
    if 0 in shape:
        return start * width, start * width
    pairs = zip(shape, strides, strict=True)
    last = start + sum((size - 1) * stride for size, stride in pairs)
    return start * width, (last + 1) * width

"""A device in slow motion: queues of work that run when a test says so.

Stands in for an accelerator where there is none, and is harsher than one: freed memory
is handed out again at once, and each queue runs as far ahead or behind of the others as
the marks between them allow.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Work = Callable[[], None]


class SlowMark:
    """A point in a queue."""

    def __init__(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        raise AssertionError("the calling thread must not wait")


class SlowStreams:
    """Three queues, and memory that is reused the moment it is freed."""

    is_concurrent = True

    def __init__(self) -> None:
        self.compute: deque[SlowMark | Work] = deque()
        self.out: deque[SlowMark | Work] = deque()
        self.back: deque[SlowMark | Work] = deque()
        self.free: dict[int, list[Tensor]] = {}

    @property
    def queues(self) -> tuple[deque[SlowMark | Work], ...]:
        return self.compute, self.out, self.back

    def allocate(self, nbytes: int) -> Tensor:
        free = self.free.setdefault(nbytes, [])
        memory = free.pop() if free else torch.zeros(nbytes, dtype=torch.uint8)
        handed_out = memory.view(nbytes)
        weakref.finalize(handed_out, free.append, memory)
        return handed_out

    def now(self) -> SlowMark:
        return self._mark(self.compute)

    def copy_out(
        self, destination: Tensor, source: Tensor, *, after: Sequence[object]
    ) -> SlowMark:
        return self._copy(self.out, destination, source, after)

    def copy_in(
        self, destination: Tensor, source: Tensor, *, after: Sequence[object]
    ) -> SlowMark:
        return self._copy(self.back, destination, source, after)

    def hold_back(self, mark: object) -> None:
        assert isinstance(mark, SlowMark)
        self.compute.append(mark)

    def run(self, which: int) -> bool:
        """Run the next piece of work of a queue; return whether it could."""
        queue = self.queues[which]
        if not queue:
            return False
        work = queue[0]
        if isinstance(work, SlowMark):
            if not work.reached:
                return False
        else:
            work()
        queue.popleft()
        return True

    def drain(self) -> None:
        """Run everything."""
        while any(self.run(which) for which in range(3)):
            pass
        assert not any(self.queues), "the queues wait for each other"

    def _copy(
        self,
        queue: deque[SlowMark | Work],
        destination: Tensor,
        source: Tensor,
        after: Sequence[object],
    ) -> SlowMark:
        queue.extend(mark for mark in after if isinstance(mark, SlowMark))
        # By address: a queue does not keep memory alive.
        target, origin = raw(destination), raw(source)

        def copy() -> None:
            target.copy_(origin)

        queue.append(copy)
        return self._mark(queue)

    def _mark(self, queue: deque[SlowMark | Work]) -> SlowMark:
        mark = SlowMark()

        def reach() -> None:
            mark.reached = True

        queue.append(reach)
        return mark


def raw(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor as one that does not keep the tensor alive."""
    return torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage(),
        tensor.storage_offset(),
        tensor.size(),
        tensor.stride(),
    )

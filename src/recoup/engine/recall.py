"""Recall: what a backward has recomputed in a region, until nobody needs it."""

from collections.abc import Iterable
from typing import Protocol

from recoup.engine.program import Live, free
from recoup.engine.values import Layout, Value


class Releasing(Protocol):
    """Is told when a saved tensor is no longer needed."""

    def release(self, saved: "Saved") -> None:
        """Take note that autograd let go of a saved tensor."""
        ...


class Saved:
    """Stands for one tensor that autograd saved in a region and that can be remade.

    It dies when autograd lets go of the saved tensor, and the region then knows that
    one demand for its value is gone.

    Attributes:
        task: The last backward in which it was asked for.
    """

    __slots__ = ("__weakref__", "layout", "region", "task", "value")

    def __init__(self, region: Releasing, value: Value, layout: Layout | None) -> None:
        self.region = region
        self.value = value
        self.layout = layout
        self.task = -1

    def __del__(self) -> None:
        self.region.release(self)


class Recall:
    """The recomputed values of a region, each until its last use.

    Counts are taken without a lock: two threads of one backward may lose one, and then
    a value is freed at the end of the backward instead, or recomputed once more.

    Args:
        live: The values, and views of them.
        wanted: The values that tensors saved by autograd still refer to.
        task: The backward that it serves.
        lasting: Keep everything, for other backwards too.
    """

    def __init__(
        self, live: Live, wanted: Iterable[Value], task: int, *, lasting: bool
    ) -> None:
        self.live = live
        self.task = task
        self._lasting = lasting
        self._pending = {} if lasting else {value: value.demand for value in wanted}

    def serves(self, task: int) -> bool:
        """Return whether the backward of this number may use it."""
        return self._lasting or self.task == task

    def count_down(self, value: Value) -> None:
        """Take note of one use less to come."""
        pending = self._pending
        left = pending.get(value, 0) - 1
        if left > 0:
            pending[value] = left
        elif left == 0:
            pending.pop(value, None)
            free(value, self.live)


def wanted_of(saved: Iterable[Value]) -> list[Value]:
    """Return those of the saved values that a replay is to give."""
    return [
        value
        for value in saved
        if value.demand > 0 and (value.hold is None or not value.hold.is_at_hand)
    ]

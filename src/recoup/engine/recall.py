"""Recall: what a backward has recomputed in a region, until nobody needs it."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from recoup.backend.storages import version_of
from recoup.engine.program import Live, free
from recoup.engine.values import Layout, Value, written_in_backward


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


class _Given:
    """What a backward function was given of a value that another one needs.

    Args:
        whole: The recomputed value.
        tensor: The value, or the view of it, that was given last.
    """

    __slots__ = ("_pairs",)

    def __init__(self, whole: Tensor, tensor: Tensor) -> None:
        self._pairs = ((whole, version_of(whole)), (tensor, version_of(tensor)))

    def check(self) -> None:
        """Raise if the function wrote to it."""
        for tensor, version in self._pairs:
            if version_of(tensor) != version:
                raise written_in_backward(tensor)


class Recall:
    """The recomputed values of a region, each until its last use.

    Counts are taken without a lock: two threads of one backward may lose one, and then
    a value is freed at the end of the backward instead, or recomputed once more.

    Args:
        live: The values, and views of them.
        wanted: The values that tensors saved by autograd still refer to.
        task: The backward that it serves.
        lasting: Keep everything, for other backwards too.
        places: Empty if values are added as they are asked for; None if all are here.
    """

    def __init__(
        self,
        live: Live,
        wanted: Iterable[Value],
        task: int,
        *,
        lasting: bool,
        places: set[int] | None = None,
    ) -> None:
        self.live = live
        self.task = task
        self._lasting = lasting
        self._pending = {} if lasting else {value: value.demand for value in wanted}
        self._given: dict[Value, _Given] = {}
        self._places = places
        self._repeated = 0
        self._known = set[Value]()

    def covers(self, value: Value) -> bool:
        """Return whether the value was computed in this backward, or cannot be."""
        return self._places is None or value in self._known

    def takes(self, places: Sequence[int]) -> bool:
        """Return whether operations at these places are worth running by themselves.

        They are until more operations have run again than have run at all; then it is
        time to run all that are left.
        """
        assert self._places is not None, "values are added one by one"
        before = len(self._places)
        self._places.update(places)
        self._repeated += before + len(places) - len(self._places)
        if self._repeated <= len(self._places):
            return True
        self._places = None
        return False

    def add(self, live: Live, wanted: Iterable[Value]) -> None:
        """Add values that were computed since."""
        self.live.update(live)
        self._known.update(wanted)
        self._pending.update({value: value.demand for value in wanted})

    def serves(self, task: int) -> bool:
        """Return whether the backward of this number may use it."""
        return self._lasting or self.task == task

    def give(self, value: Value, layout: Layout | None) -> Tensor | None:
        """Return a recomputed tensor, or None if its last use is over.

        Raises:
            ChangedTensorError: A backward function wrote to the tensor that it got, and
                this is another one that needs the value.
        """
        whole = self.live.get(value)
        if whole is None:
            return None
        tensor = whole
        if layout is not None:
            viewed = self.live.get(layout)
            tensor = layout.view(whole) if viewed is None else viewed
        given = self._given.get(value)
        if given is not None:
            given.check()
        if self._lasting or self._pending.get(value, 0) > 1:
            # A view that a replay made has a version counter of its own. Only the last
            # one is looked at, so that many views take no more than linear time.
            self._given[value] = _Given(whole, tensor)
        return tensor

    def count_down(self, value: Value) -> None:
        """Take note of one use less to come."""
        pending = self._pending
        left = pending.get(value, 0) - 1
        if left > 0:
            pending[value] = left
        elif left == 0:
            pending.pop(value, None)
            self._given.pop(value, None)
            free(value, self.live)


def wanted_of(saved: Iterable[Value]) -> list[Value]:
    """Return those of the saved values that a replay is to give."""
    return [
        value
        for value in saved
        if value.demand > 0 and (value.hold is None or not value.hold.is_at_hand)
    ]

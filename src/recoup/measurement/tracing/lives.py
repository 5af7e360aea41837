"""Lives of storages and tensors: who is who in a trace, and when each dies."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from recoup.backend.memory.ledger import storages_in
from recoup.measurement.tracing.trace import (
    Trace,
    TracedSave,
    TracedStorage,
    TracedValue,
)


class Lives:
    """Numbers the storages of a step as they are seen, and books their deaths.

    It holds weak references alone: nothing lives longer for being followed.

    Args:
        trace: What is written to.
        resident: Storages that are alive in any case: they count as nothing.
    """

    def __init__(
        self, trace: Trace, resident: Iterable[torch.UntypedStorage] = ()
    ) -> None:
        self._trace = trace
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._deaths: list[int] = []
        self._named: dict[int, weakref.ref[Tensor]] = {}
        self._unnamed: list[int] = []
        self._copies: list[weakref.ref[Any]] = []
        # What is saved without a storage is nothing that a plan could act on.
        trace.storages.append(TracedStorage(0, -1, value=0))
        trace.values.append(TracedValue(0, -1))
        for storage in resident:
            self.admit(storage, nbytes=0, born=-1)

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage was seen before."""
        return self._lookup(storage) is not None

    def value_in(self, storage: torch.UntypedStorage) -> int:
        """Return what a storage contains now; one not seen before is from outside."""
        return self._trace.storages[self._number(storage)].value

    def value_of(self, tensor: Tensor) -> int:
        """Return what a tensor names now."""
        storages = storages_in(tensor)
        return self.value_in(storages[0]) if storages else 0

    def admit(self, storage: torch.UntypedStorage, *, nbytes: int, born: int) -> int:
        """Take note of a new storage; return the value in it."""
        trace = self._trace
        number = len(trace.storages)
        value = len(trace.values)
        trace.storages.append(TracedStorage(nbytes, born, value=value))
        trace.values.append(TracedValue(number, born))
        deaths = self._deaths
        reference = weakref.ref(storage, lambda _: deaths.append(number))
        self._known[id(storage)] = (reference, number)
        return value

    def overwrite(self, storage: torch.UntypedStorage, moment: int) -> int:
        """Take note of a write; return the value after it."""
        trace = self._trace
        number = self._number(storage)
        trace.values[trace.storages[number].value].overwritten = True
        value = len(trace.values)
        trace.values.append(TracedValue(number, moment))
        trace.storages[number].value = value
        return value

    def follow(self, tensor: Tensor) -> None:
        """See how long a tensor lives whose storage a region may hold for longer.

        A region holds an alias, so the tensor itself dies when the model's code lets go
        of it.
        """
        known = self._named.get(id(tensor))
        storages = storages_in(tensor)
        if not storages or (known is not None and known() is tensor):
            return
        number = self._number(storages[0])
        self._trace.storages[number].names += 1
        unnamed = self._unnamed
        reference = weakref.ref(tensor, lambda _: unnamed.append(number))
        self._named[id(tensor)] = reference

    def follow_copy(self, save: TracedSave, tensor: Tensor) -> None:
        """See how long a replayed copy of a saved tensor exists."""
        trace = self._trace
        for storage in storages_in(tensor):
            if not self.knows(storage):
                reference = weakref.ref(storage, lambda _: _finish(trace, save))
                self._copies.append(reference)

    def bury(self) -> None:
        """Book the deaths since the last moment."""
        last = self._trace.moment - 1
        for number in self._deaths:
            self._trace.storages[number].dies = last
        self._deaths.clear()
        for number in self._unnamed:
            self._trace.storages[number].names -= 1
            self._trace.storages[number].unnamed = last
        self._unnamed.clear()

    def _lookup(self, storage: torch.UntypedStorage) -> int | None:
        known = self._known.get(id(storage))
        if known is None or known[0]() is not storage:
            return None
        return known[1]

    def _number(self, storage: torch.UntypedStorage) -> int:
        number = self._lookup(storage)
        if number is None:
            value = self.admit(storage, nbytes=0, born=-1)
            number = self._trace.values[value].storage
        return number


def _finish(trace: Trace, save: TracedSave) -> None:
    save.finished = trace.moment - 1

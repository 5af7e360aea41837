"""The trace of one training step as plain data, and its storage lifetimes."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from recoup.backend.memory.ledger import storages_in
from recoup.core.graph import Boundary


@dataclass
class TracedOperation:
    """One operator of forward, as it ran."""

    name: str
    reads: list[int]
    makes: list[int]
    timing: int
    peak_bytes: int
    own_bytes: int
    workspace_bytes: int
    state_bytes: int = 0
    asked: int = 0


@dataclass
class TracedStorage:
    """A storage that was seen in forward.

    Attributes:
        bytes: Its size.
        born: The moment that made it; -1 if it existed before.
        dies: The last moment at which it exists; None: it outlives the step.
        value: The current value.
        names: The number of live tensors on it that modules took or returned.
        unnamed: The last moment at which such a tensor existed.
    """

    bytes: int
    born: int
    dies: int | None = None
    value: int = -1
    names: int = 0
    unnamed: int | None = None


@dataclass
class TracedValue:
    """A storage at one version."""

    storage: int
    producer: int
    overwritten: bool = False


@dataclass
class TracedSave:
    """A tensor that autograd saved, with its live range in backward.

    Attributes:
        value: The saved value.
        by_region: Whether a region holds it, for longer than autograd.
        used: The moment at which it was first unpacked.
        released: The last moment at which autograd held it.
        finished: The last moment at which a replayed copy of it existed.
        is_later: Whether it was unpacked in a later pass.
    """

    value: int
    by_region: bool = False
    used: int | None = None
    released: int | None = None
    finished: int | None = None
    is_later: bool = False


@dataclass(eq=False)
class Trace:
    """One pass of a step: forward, and backward until the model is called again.

    Attributes:
        boundaries: Where modules are entered and left, in order.
        roots: The paths of the modules that the step itself called, in order.
        gradients: By parameter path, the first moment with the gradient, or -1 if it
            existed before the pass.
        called_again: The paths of the modules that backward called again, in order.
    """

    operations: list[TracedOperation] = field(default_factory=list)
    backward_bytes: list[int] = field(default_factory=list)
    backward_own_bytes: list[int] = field(default_factory=list)
    backward_timings: list[int] = field(default_factory=list)
    storages: list[TracedStorage] = field(default_factory=list)
    values: list[TracedValue] = field(default_factory=list)
    saves: list[TracedSave] = field(default_factory=list)
    boundaries: list[Boundary] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)
    gradients: dict[str, int] = field(default_factory=dict)
    called_again: dict[str, None] = field(default_factory=dict)

    def add_moments(self, other: "Trace") -> None:
        """Append the moments of an unplanned pass to those of backward."""
        for operation in other.operations:
            self.backward_bytes.append(operation.peak_bytes)
            self.backward_own_bytes.append(operation.own_bytes)
            self.backward_timings.append(operation.timing)
        self.backward_bytes += other.backward_bytes
        self.backward_own_bytes += other.backward_own_bytes
        self.backward_timings += other.backward_timings

    @property
    def model_calls(self) -> int:
        """The number of calls of the model, or of parts of it."""
        return len(self.roots)

    @property
    def moment(self) -> int:
        """The number of the next moment."""
        return len(self.operations) + len(self.backward_bytes)


class Lifetimes:
    """Numbers the storages of a step as they appear, and records their deaths.

    Holds weak references only, so tracing extends no lifetime.
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
        # Value 0 represents saved tensors without a storage, which cannot be planned.
        trace.storages.append(TracedStorage(0, -1, value=0))
        trace.values.append(TracedValue(0, -1))
        for storage in resident:
            self.admit(storage, nbytes=0, born=-1)

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage was seen before."""
        return self._lookup(storage) is not None

    def value_in(self, storage: torch.UntypedStorage) -> int:
        """Return a storage's current value; an unknown storage existed before."""
        return self._trace.storages[self._number(storage)].value

    def value_of(self, tensor: Tensor) -> int:
        """Return a tensor's current value, or 0 if it has no storage."""
        storages = storages_in(tensor)
        return self.value_in(storages[0]) if storages else 0

    def admit(self, storage: torch.UntypedStorage, *, nbytes: int, born: int) -> int:
        """Record a new storage; return its value."""
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
        """Record a write; return the value after it."""
        trace = self._trace
        number = self._number(storage)
        trace.values[trace.storages[number].value].overwritten = True
        value = len(trace.values)
        trace.values.append(TracedValue(number, moment))
        trace.storages[number].value = value
        return value

    def follow(self, tensor: Tensor) -> None:
        """Record how long a tensor lives whose storage a region may hold for longer.

        A region holds an alias, so the tensor itself dies when the model's code drops
        it.
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
        """Record how long a replayed copy of a saved tensor exists."""
        trace = self._trace
        for storage in storages_in(tensor):
            if not self.knows(storage):
                reference = weakref.ref(storage, lambda _: _finish(trace, save))
                self._copies.append(reference)

    def bury(self) -> None:
        """Record the deaths since the last moment."""
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

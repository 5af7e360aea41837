"""The tape: which operators a region ran, on which values, and what must be held."""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from recoup.backend.autograd.saved_tensors import is_activation
from recoup.backend.autograd.wrappers import inner_tensors, is_wrapper
from recoup.backend.memory.storages import (
    QUANTIZED,
    Geometry,
    free_weak_reference,
    has_storage,
    is_dense,
    lazy_bits,
    storage_address,
    take_weak_reference,
    version_of,
)
from recoup.backend.operators.properties import gives_permutation
from recoup.backend.training.optimizer_steps import STEPS
from recoup.engine.lifetime.external_holds import ExternalHolds
from recoup.engine.lifetime.handover import HANDING, is_handing_over
from recoup.engine.lifetime.operations import TapeOperation, View
from recoup.engine.lifetime.past_contents import History, Indices, LateWrites
from recoup.engine.lifetime.placement import Placement
from recoup.engine.lifetime.values import HELD, OUTSIDE, Hold, TapeValue
from recoup.engine.recording.intervals import Intervals, runs_of
from recoup.engine.replay.program import Program

_SPECIAL = QUANTIZED | {torch.complex32, torch.complex64, torch.complex128}

Watch = Callable[[TapeValue, Tensor], None]


class Tape:
    """What one region did so far, and which of its values are held.

    See docs/design/engine.md for the rules. The tape owns its values; nothing on it
    refers back to the tape.

    Args:
        placement: Which outputs to keep although they could be recomputed, and where
            kept values live.
        watch: Called with every value that an operation makes, and its tensor.

    Attributes:
        named: The value that each storage is now, by the storage's address.
        operations: What ran, in order.
        saved: The values that autograd saved, each once, in order.
        forced: The values that the user asked to be recomputed.
        tainted: The values that are partly uninitialised memory, as far as is known,
            with the parts that operations have written.
        histories: Earlier contents of storages that are written to, by address.
        unrecorded: The operators that ran without being recorded: what they returned is
            kept if it is needed.
        written: The outcomes of writes to tensors from outside.
        late: The writes to saved values that gave no new version, if there are any.
        attached: The holds of tensors from outside.
        unverified: Values with parts that no kernel writes, which are not compared.
        lazy_bits_seen: A complex tensor was met, so there may be lazy conjugations.
    """

    def __init__(self, placement: Placement, watch: Watch | None = None) -> None:
        self.named: dict[int, TapeValue | None] = {}  # first: `__del__` looks at it
        self.operations: list[TapeOperation] = []
        self.saved: dict[TapeValue, None] = {}
        self.forced: set[TapeValue] = set()
        self.tainted: dict[TapeValue, Intervals | None] = {}
        self.histories: dict[int, History] = {}
        self.unrecorded: list[str] = []
        self.written: set[TapeValue] = set()
        self.unverified: set[TapeValue] = set()
        self.late: LateWrites | None = None
        self.attached = ExternalHolds()
        self.placement = placement
        self._watch = watch
        self.lazy_bits_seen = False
        STEPS.begin(self)

    def close(self) -> None:
        """Free the storages' identities: no more recording."""
        self.settle_writes()
        self.attached.part()
        # Unpinned with the tape: that takes its time, and backward has more of it. In
        # one assignment: an interrupt must not leave an address to be freed twice.
        self.named = dict.fromkeys(self.named)

    def finish(self) -> None:
        """Free what only recording needs."""
        self.written = self.unverified = self.forced = set()
        self.tainted = {}
        self.histories = {}

    def __del__(self) -> None:
        STEPS.end(self)
        # Without a loop of Python's own: backward waits for this.
        deque(map(free_weak_reference, self.__dict__.get("named", ())), maxlen=0)

    def value_of(self, tensor: Tensor) -> TapeValue | None:
        """Return the value that the tensor names now, if the tape knows it."""
        return self.named.get(storage_address(tensor))

    def save(
        self, tensor: Tensor, address: int, value: TapeValue | None
    ) -> TapeValue | View | Hold:
        """Return what stands for a tensor that autograd saves, or a region inside.

        Returns:
            A reference to the value it names, or a hold of the tensor itself if the
            tape cannot tell how it was made. Such a tensor is kept as plain autograd
            keeps it: by reference, checked by its version.

        Raises:
            NotImplementedError: Its storage is not all of it.
        """
        tainted = self.is_blank(value, tensor) if self.tainted else False
        if value is not None and value.producer != OUTSIDE and not tainted:
            return self.lying(value, tensor)
        kind = type(tensor)
        if kind is not Tensor and kind is not Parameter and is_wrapper(tensor):
            raise NotImplementedError("its storage is empty")
        if value is None:
            value = self._admit(tensor)
        elif tensor.is_nested:
            raise NotImplementedError("a nested tensor is no view of its storage")
        if HANDING and is_handing_over():
            return self.view(tensor)
        if tainted:
            self._give_up(value)
        elif self.placement.moves_inputs and is_activation(tensor):
            found = self.view(tensor)
            self.placement.place_input(found[0], tensor.untyped_storage().nbytes())
            return found
        held = value.hold
        if (
            held is not None
            and held.tensor is tensor
            and tensor.requires_grad
            and held.geometry is None
            and held.version == version_of(tensor)
        ):
            return held  # a parameter, or a view of one, as an operation used it
        hold = self.attached.hold(tensor, address)
        if held is None:
            # Earlier uses of a value that is no longer recorded assume this geometry.
            lies = value.geometry
            if lies is None:
                # `keep_from_outside`, written out: of most parameters.
                value.hold = hold
                value.born = HELD if hold.tensor is tensor else weakref.ref(tensor)
                value.is_spare = True
            else:
                value.keep_from_outside(
                    self.attached.hold(tensor, address, lies), tensor
                )
        return hold

    def reference(self, tensor: Tensor, *, read: bool = True) -> TapeValue | View:
        """Return a reference to what the tensor names; hold it if it is from outside.

        Args:
            tensor: A tensor with a storage.
            read: Somebody looks at its contents; False if they are overwritten.

        Raises:
            NotImplementedError: The tensor has no storage.
        """
        address = storage_address(tensor)
        value = self.named.get(address)
        if value is None:
            value = self._admit(tensor)
        elif self.tainted and read and self.is_blank(value, tensor):
            self._give_up(value)
        elif value.producer != OUTSIDE:
            return self.lying(value, tensor)
        elif value.hold is not None:
            value.mark_used()
            return self.lying(value, tensor)
        if value.hold is None and value.producer == OUTSIDE:
            hold = self.attached.hold(tensor, address, value.geometry)
            value.keep_from_outside(hold, tensor)
        return self.lying(value, tensor)

    def view(self, tensor: Tensor) -> View:
        """Return a reference with a layout; hold the value if it is from outside."""
        found = self.reference(tensor)
        value = found[0] if type(found) is tuple else found
        assert isinstance(value, TapeValue), "a view begins with its value"
        return value, value.layout(self.geometry(tensor))

    def name_results(
        self,
        operation: TapeOperation,
        out: Any,
        *,
        tainted: bool = False,
        ragged: Sequence[int] = (),
    ) -> None:
        """Name the new values among the results of the last operation.

        The operation is on the tape before any value names it: an interrupt in between
        must leave no value whose producer is another one.

        Args:
            operation: What ran. It is taken off again if it has made nothing.
            out: Its results.
            tainted: They are uninitialised memory.
            ragged: Places of results with parts that the kernel does not write.
        """
        kind = type(out)
        # Plain tensors first: `isinstance` is slow, because torch overloads it.
        if kind is Tensor or (kind is not tuple and isinstance(out, Tensor)):
            self._born(operation, None, out)
        elif kind is tuple or isinstance(out, (tuple, list)):
            for place, element in enumerate(out):
                if type(element) is Tensor or isinstance(element, Tensor):
                    self._born(operation, place, element)
        if not operation.outputs:
            if not operation.writes:
                self.operations.pop()
            return
        if ragged:
            self.unverified.update(
                value for value in operation.outputs if value.place in ragged
            )
        if tainted:
            self.tainted.update(dict.fromkeys(operation.outputs))
        elif self._watch is not None:
            self._watch_outputs(operation, out)

    def meet_wrapper(self, wrapper: Tensor, *, is_written: bool) -> None:
        """Watch the version of a wrapper whose inner tensors are from outside.

        Torch counts no writes to these. Inside the region they are seen, so a wrapper
        that is written to here is not watched any more, until it is used again.
        """
        for inner in inner_tensors(wrapper):
            if not has_storage(inner):
                continue
            value = self.value_of(inner)
            if value is not None and value.producer != OUTSIDE:
                continue
            found = self.reference(inner)
            value = found[0] if type(found) is tuple else found
            assert isinstance(value, TapeValue), "a view begins with its value"
            if value.hold is not None:
                value.hold.watch(None if is_written else wrapper)

    def names_own(self, wrapper: Tensor) -> bool:
        """Return whether the region made any of the tensors inside a wrapper."""
        named = (self.value_of(t) for t in inner_tensors(wrapper) if has_storage(t))
        return any(v is not None and v.producer != OUTSIDE for v in named)

    def settle_writes(self) -> None:
        """Record that all writes so far are done: another operator is to write.

        Once for all that it writes to: a write to come has no new version yet.
        """
        if self.late is not None:
            self.late.settle()

    def is_blank(self, value: TapeValue | None, tensor: Tensor) -> bool:
        """Return whether a tensor lies in memory that no known operation has filled."""
        if value is None or value not in self.tainted:
            return False
        filled = self.tainted[value]
        if filled is None:
            return True
        runs = runs_of(tensor)
        return runs is None or not all(filled.covers(*run) for run in runs)

    def is_permutation(self, tensor: Tensor) -> bool:
        """Return whether an operation made the tensor to name each place once."""
        value = self.value_of(tensor)
        if value is None or value.producer == OUTSIDE:
            return False
        operation = self.operations[value.producer]
        return (
            value in operation.outputs
            and gives_permutation(operation.kernel.facts, value.place)
            and self.geometry(tensor) == value.geometry
        )

    def protect(
        self, tensor: Tensor, value: TapeValue | None, indices: Indices | None = None
    ) -> None:
        """Prepare for a write: what the tape refers to must survive it.

        From here on the storage has no name: an interrupt after the write must leave
        none of what it was before.

        Args:
            tensor: The tensor that is written to.
            value: The value that it names, if known.
            indices: Which of its elements, if not all.
        """
        if value is None:
            return
        if value.demand > 0:
            if self.late is None:
                self.late = LateWrites()
            self.late.before(value, tensor)
        hold = value.hold
        if hold is not None:
            if hold.stored is not None:
                value.forget_tensor()
                hold.stored.settle()
            elif value.producer != OUTSIDE:
                value.drop_hold()
            else:
                self._supersede(value, hold, tensor)
        address = storage_address(tensor)
        history = self.histories.get(address)
        if history is not None:
            history.before_write(tensor, indices)
        if value.producer != OUTSIDE or value.hold is not None:
            self.named[address] = None

    def _supersede(self, value: TapeValue, hold: Hold, tensor: Tensor) -> None:
        """Let the past keep a value from outside that is about to be written to."""
        value.forget_tensor()
        if value.is_spare:
            # Autograd checks the tensor that it was given, as in the plain run.
            value.drop_hold()
        elif hold.tensor is not None:
            address = storage_address(tensor)
            history = self.histories.get(address)
            if history is None:
                history = self.histories[address] = History(tensor)
            # Its own hold: autograd goes by the tensor that it was given.
            value.keep(hold.twin()).become_past(history.add(value))

    def settle_histories(self, needed: Program) -> None:
        """Hold the earlier contents that a program needs, and no others."""
        reads: dict[TapeValue, set[Geometry]] = {}
        for value in (*needed.roots, *self.saved):
            hold = value.hold
            if hold is not None and hold.past is not None and value not in reads:
                assert hold.geometry is not None, "set together with past"
                reads[value] = set(value.layouts or ()) if value.demand else set()
        for operation in needed.operations:
            for value, geometry in operation.lies():
                if value in reads:
                    reads[value].add(geometry)
        for history in self.histories.values():
            history.settle(reads)

    def overwrite(
        self,
        tensor: Tensor,
        operation: TapeOperation,
        before: TapeValue,
        *,
        tainted: bool = False,
        filled: bool = False,
        resized: bool = True,
    ) -> None:
        """Give the tensor's storage a new value, after a write by the last operation.

        Args:
            tensor: The tensor that was written to.
            operation: The operation that wrote.
            before: The value before.
            tainted: It is uninitialised memory.
            filled: All of the tensor was written without being read.
            resized: The tensor may have another geometry now, if it was given whole.
        """
        born = before.born
        geometry = before.geometry
        if resized and born is not None and born() is tensor:
            geometry = self.geometry(tensor)
        value = TapeValue(len(self.operations) - 1, geometry, born)
        operation.writes = (*operation.writes, (before, value))
        self.name_again(tensor, value)
        if tainted:
            self.tainted[value] = None
        elif self.tainted:
            # Another argument that the operator writes to may lie in the same storage.
            known = [before]
            for read, made in operation.writes:
                if read is before and made is not value:
                    known.append(made)
            for source in known:
                if source in self.tainted:
                    self._fill(source, value, tensor if filled else None)
        if self._watch is not None and value not in self.tainted:
            self._watch(value, tensor)
        if self.placement.policy is not None:
            self.placement.place_output(operation.kernel.facts.name, value, tensor)
            if value.hold is not None:
                value.hold.forget_version()  # the write will count when it is done

    def forget(self, tensor: Tensor) -> None:
        """Handle a write that is not recorded: the storage is opaque now."""
        value = self.named.get(storage_address(tensor))
        if value is None or value.hold is not None or value.geometry is not None:
            value = TapeValue(OUTSIDE, None)
            self.name_again(tensor, value)
        # Else nothing refers to what was there before: a value from outside is held if
        # anything does.
        self.written.add(value)

    def reshape(self, tensor: Tensor) -> None:
        """Record that the tensor itself got another geometry, as by `t_`.

        That may give it a new version, though nothing in it changes; which one is only
        known later.
        """
        value = self.value_of(tensor)
        if value is not None:
            value.forget_tensor()
            if value.hold is not None and value.hold.tensor is not None:
                # Its own hold: one that autograd was given goes by the old version.
                value.keep(self.attached.twin(value.hold)).forget_version()

    def lying(self, value: TapeValue, tensor: Tensor) -> TapeValue | View:
        """Return a reference to a value by a tensor that names it."""
        whole = value.geometry
        born = value.born
        if born is HELD:
            if value.hold is not None and value.hold.tensor is tensor:
                return value
        # The very tensor; but assigning to `.data` moves one without any operator.
        elif (
            born is not None
            and born() is tensor
            and (
                whole is None
                or (
                    tensor.stride() == whole[1]
                    and tensor.storage_offset() == whole[2]
                    and tensor.shape == whole[0]
                )
            )
        ):
            return value
        # `viewed`, written out: most saved tensors get here.
        geometry = self.geometry(tensor)
        if geometry == whole:
            return value
        return value, value.layout(geometry)

    def viewed(self, value: TapeValue, tensor: Tensor) -> TapeValue | View:
        """Return a reference to a value by a tensor that may be any view of it."""
        geometry = self.geometry(tensor)
        if geometry == value.geometry:
            return value
        return value, value.layout(geometry)

    def _watch_outputs(self, operation: TapeOperation, out: Any) -> None:
        assert self._watch is not None, "only called when somebody watches"
        for value in operation.outputs:
            if value not in self.unverified:
                place = value.place
                self._watch(value, out if place is None else out[place])

    def _admit(self, tensor: Tensor) -> TapeValue:
        if tensor.dtype in _SPECIAL:
            self.geometry(tensor)
        elif not self.lazy_bits_seen and tensor.is_neg():
            self.lazy_bits_seen = True
        if tensor.is_nested:
            raise NotImplementedError("a nested tensor is no view of its storage")
        value = TapeValue(OUTSIDE, None)
        address = take_weak_reference(tensor.untyped_storage())
        if address in self.named:  # what an interrupted operator wrote to
            free_weak_reference(address)
        self.named[address] = value
        return value

    def _fill(self, before: TapeValue, after: TapeValue, filled: Tensor | None) -> None:
        """Say which parts of a value that was uninitialised are not any more."""
        known = self.tainted.pop(before)
        if filled is not None:
            nbytes = filled.untyped_storage().nbytes()
            if filled.nbytes == nbytes and is_dense(filled):
                return
            known = known or Intervals()
            for run in runs_of(filled) or ():
                known.add(*run)
            if known.covers(0, nbytes):
                return
        self.tainted[after] = known

    def _give_up(self, value: TapeValue) -> None:
        """Uninitialised memory that somebody reads was filled behind our back."""
        self.tainted.pop(value, None)
        value.move_outside()

    def name_again(self, tensor: Tensor, value: TapeValue) -> None:
        """Let a tensor name a value that others may name too."""
        address = storage_address(tensor)
        if address not in self.named:
            take_weak_reference(tensor.untyped_storage())  # the same address, pinned
        self.named[address] = value

    def _born(
        self, operation: TapeOperation, place: int | None, tensor: Tensor
    ) -> None:
        try:
            geometry = self.geometry(tensor)
            address = take_weak_reference(tensor.untyped_storage())
        except NotImplementedError:
            return
        named = self.named
        if address in named:
            free_weak_reference(address)
            return
        producer = len(self.operations) - 1
        value = TapeValue(producer, geometry, weakref.ref(tensor), place)
        operation.outputs.append(value)
        named[address] = value
        if self.placement.policy is not None:
            self.placement.place_output(operation.kernel.facts.name, value, tensor)

    def geometry(self, tensor: Tensor) -> Geometry:
        """Return how the tensor lies in its storage.

        Raises:
            NotImplementedError: It is quantized.
        """
        dtype = tensor.dtype
        # Lazy bits come from complex tensors only; asking costs as much as the rest.
        if dtype in _SPECIAL:
            if dtype in QUANTIZED:
                raise NotImplementedError("a quantizer is not part of the storage")
            self.lazy_bits_seen = True
        try:
            stride = tensor.stride()
        except RuntimeError as error:  # a compressed sparse layout
            raise NotImplementedError("the layout has no strides") from error
        bits = lazy_bits(tensor) if self.lazy_bits_seen else 0
        shape = tensor.shape
        try:
            known = _SHAPES.get(shape)
        except TypeError:  # of numbers that are not known yet
            known = tuple(shape)
        if known is None:
            known = _add_shape(shape)
        return known, stride, tensor.storage_offset(), dtype, bits  # pyright: ignore[reportReturnType]


_SHAPES: dict[torch.Size, tuple[int, ...]] = {}
"""Shapes as plain tuples, which are nothing to the garbage collector. Making one takes
as long as all else that is asked of a tensor; a model has few."""

_MOST_SHAPES = 4096


def _add_shape(shape: torch.Size) -> tuple[int, ...]:
    if len(_SHAPES) >= _MOST_SHAPES:
        _SHAPES.clear()
    return _SHAPES.setdefault(shape, tuple(shape))

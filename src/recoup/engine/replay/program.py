"""Programs: the part of a tape that certain values need, ready to be run again."""

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from itertools import filterfalse
from typing import Any

import torch
from torch import Tensor

from recoup.backend.autograd.autocast import default_dtype, run_in_default
from recoup.backend.autograd.saved_tensors import below_autograd
from recoup.backend.autograd.transforms import outside_transforms
from recoup.backend.memory.storages import copy_storage
from recoup.backend.state.rng import random_state
from recoup.engine.lifetime.values import (
    OUTSIDE,
    Layout,
    TapeOperation,
    TapeValue,
    reads_of,
)
from recoup.engine.replay.recomputing import recomputing

Live = dict[TapeValue | Layout, Tensor]
"""Tensors of a replay: those of values, and views of them by layout."""

Part = dict[int, list[TapeValue]]
"""Places of operations, in order, with what each reads."""

Observe = Callable[[TapeValue, Tensor, str], None]
"""Called with a replayed value, its tensor and the operator that made it."""


class Program:
    """The operations that certain values need, and nothing else.

    Going back stops at held values: nothing before them is run again. Lives until
    backward, with few objects: see `TapeValue`.

    Args:
        operations: What a region ran, in order; producers are places in it.
        wanted: The values to compute, none of them held in plain sight.
        among: The places to run, in order, with what each reads, if not all that the
            values need.
        given: The values whose tensors `run` is given. They are not written to.

    Attributes:
        wanted: The values to compute.
        operations: The operations that these need, in order.
        roots: The held values that they use, in the order of their last use.
        has_one_end: Whether the last operation needs all others. If not, some of the
            values can be computed without it.
        has_parts: Whether `part_at` was asked and has found some.
        reads: What each operation reads, if `part_at` was asked.
    """

    has_parts = False
    reads: list[list[TapeValue]] | None = None
    _parts: dict[int, tuple[Part, list[TapeValue]]] | None = None

    def __init__(
        self,
        operations: Sequence[TapeOperation],
        wanted: Sequence[TapeValue],
        among: Part | None = None,
        given: Container[TapeValue] = (),
    ) -> None:
        # One mark for each operation, and one that is the mark at `OUTSIDE`.
        required = bytearray(len(operations) + 1)
        roots: list[TapeValue] = []
        for value in wanted:
            if value.hold is None:
                required[value.producer] = 1
            else:
                roots.append(value)
        needed: list[TapeOperation] = []
        freed: list[Sequence[TapeValue]] = []
        copies: dict[TapeOperation, list[TapeValue]] = {}
        later = set(wanted)
        is_later = later.__contains__
        ends = 0
        # Backwards: whoever reads a value comes after the one that made it.
        for index in reversed(range(len(operations)) if among is None else among):
            if not required[index]:
                continue
            ends += required[index] == 1
            operation = operations[index]
            frees = list(filterfalse(is_later, operation.outputs))
            if operation.writes:
                copied = _note_writes(operation, frees, later, given)
                if copied:
                    copies[operation] = copied
            for value in operation.reads() if among is None else among[index]:
                if value.hold is None:
                    required[value.producer] = 2
                if value not in later:
                    later.add(value)
                    frees.append(value)
                    if value.hold is not None:
                        roots.append(value)
            freed.append(frees)
            needed.append(operation)
        assert not required[OUTSIDE], "a value without a producer is held"
        freed.reverse()
        needed.reverse()
        self.wanted = wanted
        self.operations = needed
        self.roots = roots
        self.has_one_end = ends == 1
        self._frees = freed
        self._copies = copies

    def part_at(self, place: int) -> tuple[Part, list[TapeValue]] | None:
        """Return what the operation at a place needs, with itself, and what is wanted.

        Only where no other operation needs that one, and nothing outside of the part
        needs any of it. Then to run the part takes no search. The places are those
        that `number` gave.
        """
        if self._parts is None:
            self.reads = reads_of(self.operations)
            self._parts = _parts_of(self.reads, self.wanted)
            self.has_parts = bool(self._parts)
        return self._parts.get(place)

    def run(self, observe: Observe | None = None, given: Live | None = None) -> Live:
        """Run the operations again and return the wanted values.

        Every other value is freed at its last use. Builds no graph, moves no
        generator, and writes to nothing that existed before.

        Args:
            observe: Called with every value as it is made.
            given: Tensors that are there already. It gets the results, too.

        Returns:
            The wanted values, and the views of them that operations took.
        """
        live: Live = {} if given is None else given
        copies = self._copies
        default = default_dtype()
        # What hooks around the region keep: they may run anything to give it back.
        for value in self.roots:
            hold = value.hold
            if hold is None or value in live:
                continue
            if hold.unpack or (hold.past is not None and hold.has_parts_elsewhere):
                live[value] = _held(value, "a replay")
        # Backward may be run for a batch of gradients at once. What is replayed does
        # not depend on them, and random operators refuse to run there.
        with outside_transforms(), below_autograd(), recomputing():
            for operation, frees in zip(self.operations, self._frees, strict=True):
                copied = copies.get(operation, ()) if copies else ()
                _run_operation(operation, live, copied, default)
                if observe is not None:
                    _show(operation, live, observe)
                for value in frees:  # as `free` does
                    live.pop(value, None)
                    if value.layouts:
                        for layout in value.layouts.values():
                            live.pop(layout, None)
            for value in self.wanted:
                if value not in live:
                    live[value] = _held(value, "a backward operator")
        return live


def _parts_of(
    reads: Sequence[list[TapeValue]], wanted: Iterable[TapeValue]
) -> dict[int, tuple[Part, list[TapeValue]]]:
    """Return the parts of a program that have nothing in common, by their last place.

    Those with several ends are left out.

    Args:
        reads: What each operation reads, in order.
        wanted: The values to compute.
    """
    ends = [-1] * len(reads)
    joined: set[int] = set()
    for place in range(len(reads) - 1, -1, -1):
        end = ends[place]
        if end < 0:
            end = ends[place] = place
        for value in reads[place]:
            if value.hold is None:
                other = ends[value.producer]
                if other < 0:
                    ends[value.producer] = end
                elif other != end:
                    joined.add(other)
                    joined.add(end)
    parts: dict[int, tuple[Part, list[TapeValue]]] = {}
    for place, end in enumerate(ends):
        if end not in joined:
            parts.setdefault(end, ({}, []))[0][place] = reads[place]
    for value in wanted:
        end = ends[value.producer]
        if end in parts:
            parts[end][1].append(value)
    return parts


def _note_writes(
    operation: TapeOperation,
    frees: list[TapeValue],
    later: set[TapeValue],
    given: Container[TapeValue],
) -> list[TapeValue]:
    """Return the values that an operation must not write to itself.

    Args:
        operation: What writes.
        frees: Gets what it makes and nobody uses later.
        later: The values that are used later.
        given: The values that were there before: autograd may have their tensors.
    """
    copied: list[TapeValue] = []
    for before, after in operation.writes:
        if before in later or before.hold is not None or before in given:
            copied.append(before)
        if after not in later:
            frees.append(after)
    return copied


def number(operations: Sequence[TapeOperation]) -> None:
    """Let the values know their places among the operations, for good.

    What only recording needs to know of them is forgotten.
    """
    for index, operation in enumerate(operations):
        for value in operation.outputs:
            value.producer = index
            value.born = None
        for _, value in operation.writes:
            value.producer = index
            value.born = None


def derived_from_lossy(
    operations: Sequence[TapeOperation], roots: Iterable[TapeValue]
) -> set[TapeValue]:
    """Return the values that a replay will not give as forward did.

    They are computed from values that a lossy tier keeps.
    """
    changed = {value for value in roots if _is_lossy(value)}
    if changed:
        for operation in operations:
            if not changed.isdisjoint(operation.reads()):
                changed.update(operation.outputs)
                changed.update(value for _, value in operation.writes)
    return changed


def _is_lossy(value: TapeValue) -> bool:
    stored = None if value.hold is None else value.hold.stored
    return stored is not None and not stored.is_exact


def free(value: TapeValue, live: Live) -> None:
    """Let go of a value and of all views of it."""
    live.pop(value, None)
    for layout in value.layouts.values():
        live.pop(layout, None)


def _run_operation(
    operation: TapeOperation,
    live: Live,
    copied: Sequence[TapeValue],
    default: torch.dtype,
) -> None:
    sources = _with_copies(operation, live, copied) if copied else live
    args = operation.args.copy()
    for place in operation.places:
        reference = args[place]
        # Written out for the common kind: a call costs as much as all the rest.
        is_value = type(reference) is TapeValue
        tensor = sources.get(reference) if is_value else None
        if tensor is None:
            fill = _fetch if is_value else _fill
            tensor = fill(reference, sources, operation)
        args[place] = tensor
    kwargs = operation.kwargs
    if operation.names:
        kwargs = kwargs.copy()
        for name in operation.names:
            kwargs[name] = _fill(kwargs[name], sources, operation)
    run = operation.kernel.run
    if operation.default_dtype is not default:
        run = partial(run_in_default, operation.default_dtype, run)
    if operation.random is not None:
        with random_state(*operation.random):
            out = run(*args, **kwargs)
    elif operation.in_gradient_mode:
        with torch.enable_grad():
            out = run(*args, **kwargs)
    else:
        out = run(*args, **kwargs) if kwargs else run(*args)
    for value in operation.outputs:
        if value.hold is None:
            place = value.place
            live[value] = out if place is None else out[place]
    for before, after in operation.writes:
        live[after] = sources[before]


def _with_copies(
    operation: TapeOperation, live: Live, copied: Sequence[TapeValue]
) -> Live:
    """Return the tensors that an operation takes, and copies of those it may not write.

    Only these: copying all that is live would take time by the square of its number.
    """
    sources: Live = {
        value: copy_storage(_fetch(value, live, operation)) for value in copied
    }
    for value in operation.reads():
        if value not in sources:
            sources[value] = _fetch(value, live, operation)
    return sources


def _show(operation: TapeOperation, live: Live, observe: Observe) -> None:
    made = [value for value in operation.outputs if value.hold is None]
    made.extend(after for _, after in operation.writes)
    for value in made:
        observe(value, live[value], operation.kernel.facts.name)


def _fill(reference: Any, live: Live, operation: TapeOperation) -> Any:
    """Return the tensor that a reference stands for, or a list of them."""
    kind = type(reference)
    if kind is TapeValue:
        return _fetch(reference, live, operation)
    if kind is tuple:
        value, layout = reference
        tensor = live.get(layout)
        if tensor is None:
            tensor = live[layout] = layout.view(_fetch(value, live, operation))
        return tensor
    if kind is list:
        return [_fill(element, live, operation) for element in reference]
    return reference


def _fetch(value: TapeValue, live: Live, operation: TapeOperation) -> Tensor:
    tensor = live.get(value)
    if tensor is None:
        hold = value.hold
        assert hold is not None, "a value is run, or held, before it is used"
        if hold.address is not None:
            hold.check_memory(operation.kernel.facts.name)
        tensor = live[value] = hold.fetch(operation.kernel.facts.name)
    return tensor


def _held(value: TapeValue, user: str) -> Tensor:
    assert value.hold is not None, "a value is run, or held, before it is used"
    return value.hold.fetch(user)

"""Programs: the part of a tape that recomputes certain values."""

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from itertools import filterfalse
from typing import Any

import torch
from torch import Tensor

from recoup.backend.autograd.autocast import default_dtype, run_in_default
from recoup.backend.autograd.saved_tensors import below_autograd
from recoup.backend.autograd.transforms import is_transformed, outside_transforms
from recoup.backend.memory.storages import copy_storage
from recoup.backend.state.rng import random_state
from recoup.engine.lifetime.operations import TapeOperation
from recoup.engine.lifetime.values import OUTSIDE, Layout, TapeValue
from recoup.engine.replay.program_parts import (
    MOST_ENDS,
    WANTED,
    Part,
    ProgramParts,
)
from recoup.engine.replay.recomputing import recomputing

Live = dict[TapeValue | Layout, Tensor]
"""Tensors of a replay: those of values, and views of them by layout."""

Among = dict[int, list[TapeValue]]
"""Positions of operations, in order, with the values that each reads."""

Observe = Callable[[TapeValue, Tensor, str], None]
"""Callback with a replayed value, its tensor and the operator that made it."""


class Program:
    """The operations that certain values need, and nothing else.

    The search for ancestors stops at held values. Lives until backward, with few
    objects: see `TapeValue`.

    Args:
        operations: The operations of a region, in order; producers are positions in it.
        wanted: The values to compute, none of them held on its device.
        among: The positions to run, in order, with the values that each reads, if not
            everything that the wanted values need.
        given: The values whose tensors `run` is given. They are not written to.

    Attributes:
        wanted: The values to compute.
        operations: The operations that these need, in order.
        roots: The held values that they use, in the order of their last use.
        has_one_end: Whether the last operation needs all others. If not, some of the
            values can be computed without it.
        has_writes: Whether any of the operations writes to a value.
    """

    _parts: ProgramParts | None = None

    def __init__(  # noqa: C901, PLR0912, PLR0915 (written out: forward waits for this)
        self,
        operations: Sequence[TapeOperation],
        wanted: Sequence[TapeValue],
        among: Among | None = None,
        given: Container[TapeValue] = (),
    ) -> None:
        # One mark per operation, and one at `OUTSIDE`: a bit for each end that needs
        # the operation. An end is wanted, and no other operation reads it.
        marks = [0] * (len(operations) + 1)
        roots: list[TapeValue] = []
        for value in wanted:
            if value.hold is None:
                marks[value.producer] = WANTED
            else:
                roots.append(value)
        needed: list[TapeOperation] = []
        freed: list[Sequence[TapeValue]] = []
        copies: dict[TapeOperation, list[TapeValue]] = {}
        later = set(wanted)
        is_later = later.__contains__
        ends: list[int] = []
        has_writes = False
        # In reverse, because readers of a value come after its producer.
        for index in reversed(range(len(operations)) if among is None else among):
            mark = marks[index]
            if not mark:
                continue
            if mark == WANTED:
                mark = marks[index] = WANTED << min(len(ends) + 1, MOST_ENDS)
                ends.append(len(needed))
            operation = operations[index]
            frees = list(filterfalse(is_later, operation.outputs))
            if operation.writes:
                has_writes = True
                copied = _note_writes(operation, frees, later, given)
                if copied:
                    copies[operation] = copied
            others: Iterable[TapeValue] = ()
            if among is not None:
                others = among[index]
            else:
                # `reads`, inlined for common kinds: this is on forward's critical path.
                args = operation.args
                for place in operation.places:
                    value = args[place]
                    if type(value) is tuple:
                        value = value[0]
                    elif type(value) is not TapeValue:  # a list of them
                        others = operation.reads()
                        continue
                    if value.hold is None:
                        marks[value.producer] |= mark
                    elif value not in later:
                        roots.append(value)
                    if value not in later:
                        later.add(value)
                        frees.append(value)
                if operation.names:
                    others = operation.reads()
            for value in others:
                if value.hold is None:
                    marks[value.producer] |= mark
                elif value not in later:
                    roots.append(value)
                if value not in later:
                    later.add(value)
                    frees.append(value)
            freed.append(frees)
            needed.append(operation)
        assert not marks[OUTSIDE], "a value without a producer is held"
        freed.reverse()
        needed.reverse()
        self.wanted = wanted
        self.operations = needed
        self.roots = roots
        self.has_one_end = len(ends) == 1
        self._frees = freed
        self._copies = copies
        self._ends = ends
        self._marks = marks if len(ends) > 1 else ()
        self.has_writes = has_writes

    @property
    def parts(self) -> ProgramParts:
        """The operations that each of its ends needs, by the positions of `number`."""
        parts = self._parts
        if parts is None:
            marks = self._marks or [WANTED << 1] * len(self.operations)
            parts = self._parts = ProgramParts(
                self.operations, self.wanted, marks, self._ends
            )
        return parts

    def part_at(self, place: int) -> Part | None:
        """Return the independent part that ends at a position, or None.

        The part is an end with all operations that it needs, if nothing outside of it
        needs any of them, so that it can run without a search. Positions are those of
        `number`.
        """
        return self.parts.alone.get(place)

    def run(
        self,
        observe: Observe | None = None,
        given: Live | None = None,
        part: Part | None = None,
    ) -> Live:
        """Run the operations and return the wanted values.

        Every other value is freed at its last use. Builds no graph, advances no
        generator, and writes to no tensor that existed before.

        Args:
            observe: Callback for every value that is made.
            given: Existing tensors, to which the results are added.
            part: The part to run, by default everything. The result may then also
                contain held values that it uses.

        Returns:
            The wanted values, and the views of them that operations used.
        """
        if not is_transformed():
            return self._run(observe, given, part)
        # Backward may run with batched gradients. Replays do not depend on them, and
        # random operators are forbidden there.
        with outside_transforms():
            return self._run(observe, given, part)

    def _run(  # noqa: C901, PLR0912 (written out: backward waits for this)
        self, observe: Observe | None, given: Live | None, part: Part | None
    ) -> Live:
        live: Live = {} if given is None else given
        operations, freed, copies = self.operations, self._frees, self._copies
        default = default_dtype()
        with below_autograd(), recomputing():
            for place in range(len(operations)) if part is None else part[0]:
                operation = operations[place]
                sources = live
                if copies and operation in copies:
                    sources = _with_copies(operation, live, copies[operation])
                args = operation.args.copy()
                # Inlined for the common kinds: a call costs as much as the rest.
                for position in operation.places:
                    reference = args[position]
                    if type(reference) is TapeValue:
                        tensor = sources.get(reference)
                        if tensor is None:
                            tensor = _held_for(operation, reference)
                            sources[reference] = tensor
                        args[position] = tensor
                    else:
                        args[position] = _fill(reference, sources, operation)
                kernel = operation.kernel
                if (
                    kernel.simple
                    and not operation.kwargs
                    and operation.default_dtype is default
                ):
                    out = kernel.run(*args)
                else:
                    out = _run_special(operation, args, sources, default)
                for value in operation.outputs:
                    if value.hold is None:
                        at = value.place
                        live[value] = out if at is None else out[at]
                for before, after in operation.writes:
                    live[after] = sources[before]
                if observe is not None:
                    _show(operation, live, observe)
                for value in freed[place]:  # as `free` does
                    live.pop(value, None)
                    if value.layouts:
                        for layout in value.layouts.values():
                            live.pop(layout, None)
            # A part has no held values to fetch.
            for value in self.wanted if part is None else ():
                if value not in live:
                    assert value.hold is not None, "a value is run, or held"
                    live[value] = value.hold.fetch("a backward operator")
        return live


def _note_writes(
    operation: TapeOperation,
    frees: list[TapeValue],
    later: set[TapeValue],
    given: Container[TapeValue],
) -> list[TapeValue]:
    """Return the values that must be copied before an operation writes to them.

    Args:
        operation: The writing operation.
        frees: A list to which its unused results are added.
        later: The values that are used later.
        given: The values that existed before: autograd may have their tensors.
    """
    copied: list[TapeValue] = []
    for before, after in operation.writes:
        if before in later or before.hold is not None or before in given:
            copied.append(before)
        if after not in later:
            frees.append(after)
    return copied


def derived_from_lossy(
    operations: Sequence[TapeOperation], roots: Iterable[TapeValue]
) -> set[TapeValue]:
    """Return the values that a replay does not reproduce bitwise.

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
    """Free a value and all views of it."""
    live.pop(value, None)
    if value.layouts:
        for layout in value.layouts.values():
            live.pop(layout, None)


def _run_special(
    operation: TapeOperation, args: list[Any], sources: Live, default: torch.dtype
) -> Any:
    """Run an operation that may need more than positional arguments."""
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
            return run(*args, **kwargs)
    if operation.kernel.facts.asks_gradient_mode:
        with torch.enable_grad():
            return run(*args, **kwargs)
    return run(*args, **kwargs)


def _with_copies(
    operation: TapeOperation, live: Live, copied: Sequence[TapeValue]
) -> Live:
    """Return an operation's input tensors, with copies of those it must not write to.

    Only these: copying the dictionary of live tensors would take quadratic time.
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
    """Return the tensor of a reference, or a list of them."""
    kind = type(reference)
    if kind is TapeValue:
        return _fetch(reference, live, operation)
    if kind is tuple:
        value, layout = reference
        tensor = live.get(layout)
        if tensor is None:
            whole = live.get(value)
            if whole is None:
                whole = live[value] = _held_for(operation, value)
            tensor = live[layout] = layout.view(whole)
        return tensor
    if kind is list:
        return [_fill(element, live, operation) for element in reference]
    return reference


def _fetch(value: TapeValue, live: Live, operation: TapeOperation) -> Tensor:
    tensor = live.get(value)
    if tensor is None:
        tensor = live[value] = _held_for(operation, value)
    return tensor


def _held_for(operation: TapeOperation, value: TapeValue) -> Tensor:
    """Return the tensor of a held value for an operation, if it is unchanged."""
    hold = value.hold
    assert hold is not None, "a value is run, or held, before it is used"
    if hold.address is not None:
        hold.check_memory(operation.kernel.facts.name)
    return hold.fetch(operation.kernel.facts.name)

"""Programs: the part of a tape that certain values need, ready to be run again."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from recoup.backend.graph import below_autograd
from recoup.backend.rng import random_state
from recoup.backend.storages import copy_storage
from recoup.engine.recomputing import recomputing
from recoup.engine.values import Layout, Operation, Value

Live = dict[Value | Layout, Tensor]
"""Tensors of a replay: those of values, and views of them by layout."""

Observe = Callable[[Value, Tensor, str], None]
"""Called with a replayed value, its tensor and the operator that made it."""


class Step:
    """One operation of a program, with what happens to values around it.

    Attributes:
        operation: What to run.
        copies: Values it writes to that are needed unchanged: it gets copies.
        frees: Values that nobody needs after it.
    """

    __slots__ = ("copies", "frees", "operation")

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.copies: list[Value] = []
        self.frees: list[Value] = []


class Program:
    """The operations that certain values need, and nothing else.

    Args:
        operations: The operations needed, in order; see `needed`.
        roots: The held values that these use.
        wanted: The values to compute.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        roots: Sequence[Value],
        wanted: list[Value],
    ) -> None:
        self.wanted = wanted
        self.steps = [Step(operation) for operation in operations]
        # What hooks around the region keep: they may run anything to give it back.
        self._elsewhere = [v for v in roots if v.hold is not None and v.hold.unpack]
        self._schedule()

    def run(self, observe: Observe | None = None) -> Live:
        """Run the operations again and return the wanted values.

        Every other value is freed at its last use. Builds no graph, moves no
        generator, and writes to nothing that existed before.

        Args:
            observe: Called with every value as it is made.

        Returns:
            The wanted values, and the views of them that operations took.
        """
        live: Live = {}
        for value in self._elsewhere:
            live[value] = _held(value, "a replay")
        with below_autograd(), recomputing():
            for step in self.steps:
                _run_step(step, live)
                if observe is not None:
                    _show(step.operation, live, observe)
                for value in step.frees:
                    free(value, live)
            for value in self.wanted:
                if value not in live:
                    live[value] = _held(value, "a backward operator")
        return live

    def _schedule(self) -> None:
        """Find out when each value is last used."""
        later = set(self.wanted)
        for step in reversed(self.steps):
            operation = step.operation
            mentioned = operation.reads()
            mentioned.extend(operation.outputs)
            for before, after in operation.writes:
                if before in later or before.hold is not None:
                    step.copies.append(before)
                mentioned.append(after)
            for value in mentioned:
                if value not in later:
                    later.add(value)
                    step.frees.append(value)


def needed(
    operations: Sequence[Operation], wanted: Iterable[Value]
) -> tuple[list[int], list[Value]]:
    """Return the operations that the wanted values need, and the held values these use.

    Going back stops at held values: nothing before them is run again.
    """
    required: set[int] = set()
    # In order: hooks around the region may tell what they get by its place.
    roots: dict[Value, None] = {}
    stack = list(wanted)
    while stack:
        value = stack.pop()
        if value.hold is not None:
            roots[value] = None
            continue
        producer = value.producer
        if producer not in required:
            assert producer >= 0, "a value without a producer is held"
            required.add(producer)
            operations[producer].collect_reads(stack)
    return sorted(required), list(roots)


def derived_from_lossy(
    operations: Sequence[Operation], roots: Iterable[Value]
) -> set[Value]:
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


def _is_lossy(value: Value) -> bool:
    stored = None if value.hold is None else value.hold.stored
    return stored is not None and not stored.is_exact


def free(value: Value, live: Live) -> None:
    """Let go of a value and of all views of it."""
    live.pop(value, None)
    for layout in value.layouts:
        live.pop(layout, None)


def _run_step(step: Step, live: Live) -> None:
    operation = step.operation
    sources = _with_copies(step, live) if step.copies else live
    args = operation.args.copy()
    for place in operation.places:
        args[place] = _fill(args[place], sources, operation)
    kwargs = operation.kwargs
    if operation.names:
        kwargs = kwargs.copy()
        for name in operation.names:
            kwargs[name] = _fill(kwargs[name], sources, operation)
    run = operation.kernel.run
    if operation.random is not None:
        with random_state(*operation.random):
            out = run(*args, **kwargs)
    elif operation.in_gradient_mode:
        with torch.enable_grad():
            out = run(*args, **kwargs)
    else:
        out = run(*args, **kwargs)
    for value in operation.outputs:
        if value.hold is None:
            place = value.place
            live[value] = out if place is None else out[place]
    for before, after in operation.writes:
        live[after] = sources[before]


def _with_copies(step: Step, live: Live) -> Live:
    """Return the live tensors with copies of those that are needed unchanged."""
    sources = live.copy()
    for value in step.copies:
        free(value, sources)
        sources[value] = copy_storage(_fetch(value, live, step.operation))
    return sources


def _show(operation: Operation, live: Live, observe: Observe) -> None:
    made = [value for value in operation.outputs if value.hold is None]
    made.extend(after for _, after in operation.writes)
    for value in made:
        observe(value, live[value], operation.kernel.facts.name)


def _fill(reference: Any, live: Live, operation: Operation) -> Any:
    """Return the tensor that a reference stands for, or a list of them."""
    kind = type(reference)
    if kind is Value:
        tensor = live.get(reference)
        return _fetch(reference, live, operation) if tensor is None else tensor
    if kind is tuple:
        value, layout = reference
        tensor = live.get(layout)
        if tensor is None:
            tensor = live[layout] = layout.view(_fetch(value, live, operation))
        return tensor
    if kind is list:
        return [_fill(element, live, operation) for element in reference]
    return reference


def _fetch(value: Value, live: Live, operation: Operation) -> Tensor:
    tensor = live.get(value)
    if tensor is None:
        tensor = live[value] = _held(value, operation.kernel.facts.name)
    return tensor


def _held(value: Value, user: str) -> Tensor:
    assert value.hold is not None, "a value is run, or held, before it is used"
    return value.hold.fetch(user)

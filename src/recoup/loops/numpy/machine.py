"""NumPy machine: holds, runs and reverses the steps of one loop on arrays."""

import copy
import functools
import importlib
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from recoup.backend.state.walk import LEAVES, reach
from recoup.errors import CaptureError, UnsupportedError, UsageError
from recoup.loops.drive import LoopMachine
from recoup.loops.state_digest import StateDigest
from recoup.loops.state_trees import Structure, flatten, unflatten
from recoup.loops.steps import LoopStep

Held = tuple[Structure, list[Any]]


class NumpyMachine(LoopMachine):
    """Runs the steps of one loop on arrays.

    Attributes:
        vjp: The user's derivative of a step, if there is one.
        values: The captured arrays without their traces, in the same order.
    """

    def __init__(
        self,
        step: LoopStep,
        captured: Sequence[Any],
        vjp: Callable[..., Any] | None,
        *,
        verify: str,
        tolerance: float | None,
    ) -> None:
        super().__init__(step, verify, tolerance)
        self.captured = list(captured)
        self.capture_count = len(self.captured)
        self.values: list[Any] = list(captured)
        self.outside: list[Any] | None = None
        self.rows: list[list[Any]] = []
        self.output_structure: Structure = None
        self.vjp = vjp

    def seeing(self, values: Sequence[Any]) -> LoopStep:
        """Return the step with the captured values replaced."""
        if not self.captured:
            return self.step
        pairs = zip(self.captured, values, strict=True)
        others = {id(box): value for box, value in pairs}
        return replace(self.step, function=rebuilt(self.step.function, others))

    def hold(self, state: Any, step: int, tier: int) -> Held:
        """Return a handle for a state: read-only copies."""
        del tier
        leaves, structure = flatten(state)
        kept = [_frozen_copy(leaf) for leaf in leaves]
        if step > 0 and self.sweeping in self.verified_when:
            self.digests[step] = StateDigest(kept, self.tolerance)
        return structure, kept

    def take(self, held: Held) -> Any:
        """Return a held state."""
        structure, leaves = held
        if self.in_place:
            leaves = [_copied_leaf(leaf) for leaf in leaves]
        return unflatten(structure, leaves)

    def advance(self, state: Any, start: int, stop: int) -> Any:
        """Run steps on values without traces."""
        return self.advance_by(self.seeing(self.values), state, start, stop)

    def tape(self, state: Any, start: int, stop: int) -> Any:
        """Run steps traced."""
        return _tapes().record_steps(self, state, start, stop)

    def pull(self, tape: Any) -> None:
        """Pull the cotangents back through a tape."""
        _tapes().pull_record(self, tape)

    def after(self, tape: Any) -> Any:
        """Return the state after a tape of forward, and collect its outputs."""
        if tape.outputs:
            self.rows += tape.plain_rows()
            self.output_structure = tape.output_structure
        return unflatten(tape.structure, tape.values())

    def reverse(self, state: Any, start: int, stop: int) -> None:
        """Pull the cotangents back through steps, by a tape or the user's vjp."""
        if self.vjp is not None:
            self._reverse_by_vjp(state, start, stop)
        else:
            super().reverse(state, start, stop)

    def compare(self, tape: Any) -> None:
        """Raise if the steps of a tape ended in another state than in forward."""
        self._compare(tape.values(), tape.start, tape.stop)

    def _compare(self, after: list[Any], start: int, stop: int) -> None:
        known = self.digests.pop(stop, None)
        if known is not None and any(known.differs(after)):
            raise self.mismatch(start, stop)

    def refuse_remains(self) -> None:
        """Raise if the step has stored arrays in its captures."""
        function = self.seeing(self.values).function
        known = None if self.outside is None else {id(array) for array in self.outside}
        found = [
            array
            for array in reach(function, kind=np.ndarray)
            if known is not None and self.verify != "off" and id(array) not in known
        ]
        if found or traced_arrays(function):
            raise CaptureError(
                f"{self.step.name!r} keeps an array outside of the state: it is made "
                "without a trace, and recomputed in backward, so its gradient would be "
                "lost; return it as part of the state, or as an output with "
                "with_outputs=True; keep numbers for a log."
            )

    def outputs(self) -> list[Any]:
        """Return the stacked leaves of the outputs."""
        return [np.stack(column) for column in zip(*self.rows, strict=True)]

    def put_output(self, index: int, output: Any) -> None:
        """Collect the output of a step."""
        del index
        leaves, self.output_structure = flatten(output)
        self.rows.append(leaves)

    def run_first(self, step: LoopStep, state: Any) -> tuple[Any, Any]:
        """Run the first step on a copy; detect whether it writes to it."""
        leaves, structure = flatten(state)
        copies = [_copied_leaf(leaf) for leaf in leaves]
        before = StateDigest(copies)
        result = step.run(unflatten(structure, copies), 0)
        self.in_place = any(before.differs(copies))
        # Arrays that the first step leaves behind count as its own cache.
        self.outside = reach(step.function, kind=np.ndarray)
        return result

    def _reverse_by_vjp(self, state: Any, start: int, stop: int) -> None:
        step, vjp = self.step, self.vjp
        assert vjp is not None, "checked by the caller"
        if step.with_outputs:
            raise UnsupportedError(
                "expected vjp= without outputs, got with_outputs=True; write the step "
                "with autograd.numpy instead."
            )
        states = [state]
        for index in range(start, stop):
            # A step that writes to its state must not change one kept for its vjp.
            given = self.take(self.hold(states[-1], 0, 0))
            states.append(step.advance(given, index, index + 1))
        after, structure = flatten(states.pop())
        self._compare(after, start, stop)
        cotangent = unflatten(structure, self.cotangents.state)
        for index in range(stop - 1, start - 1, -1):
            arguments = [index] if step.with_index else []
            if step.feed is not None:
                arguments.append(step.feed.at(index))
            cotangent = vjp(states.pop(), cotangent, *arguments)
        self.cotangents.state, found = flatten(cotangent)
        if found != structure:
            raise UsageError(
                "expected vjp= to return a cotangent with the pytree structure of the "
                "state, got another structure."
            )


def _tapes() -> Any:
    """Return the module of tapes, which needs HIPS autograd, an optional package."""
    return importlib.import_module("recoup.loops.numpy.step_tape")


def traced_arrays(thing: Any) -> list[Any]:
    """Return the traced arrays of HIPS autograd that an object can reach."""
    tracer = sys.modules.get("autograd.tracer")
    return [] if tracer is None else reach(thing, kind=tracer.Box)


def hides_arrays(leaf: Any) -> bool:
    """Return whether a leaf of a state is an object with arrays inside."""
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind == "O"
    return bool(reach(leaf, kind=np.ndarray) or traced_arrays(leaf))


def _copied_leaf(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _frozen_copy(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray):
        return leaf
    kept = leaf.copy()
    kept.flags.writeable = False
    return kept


def is_continuous(value: Any) -> bool:
    """Return whether a value has derivatives: a float, complex or an array of them."""
    if isinstance(value, (float, complex)):
        return True
    return isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "fc"


_LIBRARIES = ("torch.", "numpy.", "math.", "builtins.")


def rebuilt(function: Any, others: dict[int, Any]) -> Any:
    """Return a function with some captured objects, by `id`, replaced.

    Nothing existing is changed: functions, containers and objects in between are copied
    where they differ. Globals are not replaced.

    Examples:
        >>> factor = 2
        >>> def make(factor):
        ...     return lambda x: x * factor
        >>> double = make(factor)
        >>> rebuilt(double, {id(factor): 10})(4), double(4)
        (40, 8)
    """
    return _rebuilt(function, others, {})


def _rebuilt(thing: Any, others: dict[int, Any], begun: dict[int, Any]) -> Any:
    if id(thing) in others:
        return others[id(thing)]
    if id(thing) in begun or isinstance(thing, LEAVES):
        return begun.get(id(thing), thing)
    begun[id(thing)] = thing  # a recursive function keeps referring to itself
    made = _copied(thing, lambda part: _rebuilt(part, others, begun))
    begun[id(thing)] = made
    return made


def _copied(thing: Any, change: Any) -> Any:
    if isinstance(thing, types.FunctionType):
        return _copied_function(thing, change)
    if isinstance(thing, functools.partial):
        changed = change((thing.func, thing.args, thing.keywords))
        func, args, keywords = changed
        return functools.partial(func, *args, **keywords)
    if isinstance(thing, types.MethodType):
        return types.MethodType(change(thing.__func__), change(thing.__self__))
    if type(thing) in (list, tuple):
        parts = [change(part) for part in thing]
        same = all(map(_is, parts, thing))
        return thing if same else type(thing)(parts)
    if type(thing) is dict:
        parts = {name: change(part) for name, part in thing.items()}
        return thing if all(parts[n] is thing[n] for n in thing) else parts
    own = getattr(thing, "__dict__", None)
    if own is None or f"{type(thing).__module__}.".startswith(_LIBRARIES):
        return thing
    parts = {name: change(part) for name, part in own.items()}
    if all(parts[name] is own[name] for name in own):
        return thing
    made = copy.copy(thing)
    made.__dict__.update(parts)
    return made


def _copied_function(function: types.FunctionType, change: Any) -> Any:
    cells = function.__closure__ or ()
    contents = [_content(cell) for cell in cells]
    changed = [change(content) for content in contents]
    defaults = change(function.__defaults__)
    named = change(function.__kwdefaults__)
    if (
        all(map(_is, contents, changed))
        and defaults is function.__defaults__
        and named is function.__kwdefaults__
    ):
        return function
    made = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        defaults,
        tuple(map(_cell, changed)),
    )
    made.__kwdefaults__ = named
    made.__qualname__ = function.__qualname__
    return made


class _Empty:
    """The content of a variable without a value."""


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _Empty


def _cell(content: Any) -> types.CellType:
    return types.CellType() if content is _Empty else types.CellType(content)


def _is(one: Any, other: Any) -> bool:
    return one is other

"""NumPy machine: holds, runs and reverses the steps of one loop on arrays."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from recoup.backend.state.walk import reach
from recoup.errors import CaptureError, MismatchError, UnsupportedError, UsageError
from recoup.loops.numpy.substitution import rebuilt
from recoup.loops.state_digest import StateDigest
from recoup.loops.state_trees import Structure, flatten, unflatten
from recoup.loops.steps import LoopStep

Held = tuple[Structure, list[Any]]


class NumpyMachine:
    """Runs the steps of one loop on arrays.

    Args:
        step: What to run.
        captured: The traced arrays its function captures.
        vjp: Pulls a cotangent back through one step, if the user gave one.
        verify: Which states to recognise: "first", "always" or "off".
        tolerance: The difference allowed; None for equal bits.

    Attributes:
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
        self.step = step
        self.captured = list(captured)
        self.values: list[Any] = list(captured)
        self.sweeping = True
        self.in_place = False
        self.outside: list[Any] | None = None
        self.rows: list[list[Any]] = []
        self.output_structure: Structure = None
        self.witnesses: dict[int, StateDigest] = {}
        self.state_cotangents: list[Any] = []
        self.output_cotangents: Sequence[Any] = ()
        self.captured_cotangents: list[Any] = []
        self.feed_cotangents: list[Any] = []
        self._vjp = vjp
        self._verify = verify
        self._tolerance = tolerance

    @property
    def has_vjp(self) -> bool:
        """Whether the user gave derivatives."""
        return self._vjp is not None

    def seeing(self, values: Sequence[Any]) -> LoopStep:
        """Return the step with other values in place of the captured ones."""
        if not self.captured:
            return self.step
        pairs = zip(self.captured, values, strict=True)
        others = {id(box): value for box, value in pairs}
        return replace(self.step, function=rebuilt(self.step.function, others))

    def hold(self, state: Any, step: int, tier: int) -> Held:
        """Return what keeps a state: copies that cannot be written to."""
        del tier
        leaves, structure = flatten(state)
        kept = [_frozen_copy(leaf) for leaf in leaves]
        first = self._verify == "first" and self.sweeping
        if step > 0 and (first or self._verify == "always"):
            self.witnesses[step] = StateDigest(kept, self._tolerance)
        return structure, kept

    def take(self, held: Held) -> Any:
        """Return a state that is held."""
        structure, leaves = held
        if self.in_place:
            leaves = [_copied(leaf) for leaf in leaves]
        return unflatten(structure, leaves)

    def advance(self, state: Any, start: int, stop: int) -> Any:
        """Run steps on plain values."""
        step = self.seeing(self.values)
        if self.sweeping and start == 0:
            state = self._first(step, state)
            start = 1
        if not (self.sweeping and step.with_outputs):
            return step.advance(state, start, stop)
        for index in range(start, stop):
            state, output = step.run(state, index)
            self._put(output)
        return state

    def reverse(self, state: Any, start: int, stop: int) -> None:
        """Run steps on traced values and pull the cotangents back through them."""
        if self._vjp is not None:
            self._reverse_by_vjp(state, start, stop)
        else:
            # HIPS autograd is optional.
            from recoup.loops.numpy.step_tape import pull_record, record_steps

            record = record_steps(self, state, start, stop)
            self.recognise(record.values(), start, stop)
            pull_record(self, record)

    def recognise(self, after: list[Any], start: int, stop: int) -> None:
        """Raise if the steps ended in another state than in forward."""
        witness = self.witnesses.pop(stop, None)
        if witness is not None and any(witness.differs(after)):
            raise MismatchError(
                f"the steps {start} to {stop - 1} of the loop over {self.step.name!r} "
                "were run again in backward and gave another state than in forward. A "
                "step must depend on its arguments alone: look for counters, in-place "
                "changes and random numbers; or allow a difference with tolerance=, or "
                'switch the check off with verify="off".'
            )

    def refuse_remains(self) -> None:
        """Raise if the step has kept arrays in what it captures."""
        function = self.seeing(self.values).function
        known = None if self.outside is None else {id(array) for array in self.outside}
        found = [
            array
            for array in reach(function, kind=np.ndarray)
            if known is not None and self._verify != "off" and id(array) not in known
        ]
        if found or traced_arrays(function):
            raise CaptureError(
                f"{self.step.name!r} keeps an array outside of the state: it is made "
                "without a trace, and made again in backward, so its gradient would be "
                "lost. Return it as a part of the state, or as an output with "
                "with_outputs=True; keep numbers for a log."
            )

    def outputs(self) -> list[Any]:
        """Return the stacked leaves of the outputs."""
        return [np.stack(column) for column in zip(*self.rows, strict=True)]

    def _put(self, output: Any) -> None:
        leaves, self.output_structure = flatten(output)
        self.rows.append(leaves)

    def _first(self, step: LoopStep, state: Any) -> Any:
        """Run the first step on a copy, and see whether it writes to it."""
        leaves, structure = flatten(state)
        copies = [_copied(leaf) for leaf in leaves]
        before = StateDigest(copies)
        state, output = step.run(unflatten(structure, copies), 0)
        self.in_place = any(before.differs(copies))
        if step.with_outputs:
            self._put(output)
        # What the first step has made for itself is a cache of its own.
        self.outside = reach(step.function, kind=np.ndarray)
        return state

    def _reverse_by_vjp(self, state: Any, start: int, stop: int) -> None:
        step, vjp = self.step, self._vjp
        assert vjp is not None, "asked for by the caller"
        if step.with_outputs:
            raise UnsupportedError(
                "vjp= pulls back through the state alone: got with_outputs=True. Write "
                "the step with autograd.numpy instead."
            )
        states = [state]
        for index in range(start, stop):
            # A step that writes to its state must not write to one kept for its vjp.
            given = self.take(self.hold(states[-1], 0, 0))
            states.append(step.advance(given, index, index + 1))
        after, structure = flatten(states.pop())
        self.recognise(after, start, stop)
        cotangent = unflatten(structure, self.state_cotangents)
        for index in range(stop - 1, start - 1, -1):
            arguments = [index] if step.with_index else []
            if step.feed is not None:
                arguments.append(step.feed.at(index))
            cotangent = vjp(states.pop(), cotangent, *arguments)
        self.state_cotangents, found = flatten(cotangent)
        if found != structure:
            raise UsageError(
                "vjp= returned a cotangent that is built otherwise than the state. "
                "Return the same structure."
            )


def traced_arrays(thing: Any) -> list[Any]:
    """Return the arrays that HIPS autograd traces and that an object can see."""
    tracer = sys.modules.get("autograd.tracer")
    return [] if tracer is None else reach(thing, kind=tracer.Box)


def hides_arrays(leaf: Any) -> bool:
    """Return whether a leaf of a state is an object with arrays inside."""
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind == "O"
    return bool(reach(leaf, kind=np.ndarray) or traced_arrays(leaf))


def _copied(leaf: Any) -> Any:
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

"""HIPS autograd: steps on a tape, the pull back, and a loop as one primitive."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from autograd import make_vjp
from autograd.builtins import tuple as traced_tuple
from autograd.core import VJPNode, add_outgrads
from autograd.extend import defvjp_argnums, primitive
from autograd.numpy import stack
from autograd.tracer import Box, isbox, new_box, trace_stack
from autograd.util import toposort

from recoup.backend.state.walk import reach
from recoup.errors import CaptureError
from recoup.loops.numpy.loop import NumpyRun
from recoup.loops.numpy.machine import NumpyMachine, is_continuous
from recoup.loops.state_trees import flatten, unflatten
from recoup.loops.steps import RecordedSteps


@dataclass(slots=True)
class Record(RecordedSteps):
    """Steps that ran traced.

    Attributes:
        leaves: The leaves of the state before, untraced.
        captured: The captured arrays, traced.
    """

    leaves: list[Any] = field(default_factory=list)
    captured: list[Any] = field(default_factory=list)

    def values(self) -> list[Any]:
        """Return the leaves of the state after, without their traces."""
        return [_value(leaf) for leaf in self.after]

    def plain_rows(self) -> list[list[Any]]:
        """Return the leaves of the outputs, without their traces."""
        return [[_value(leaf) for leaf in row] for row in self.outputs]


def record_steps(machine: NumpyMachine, state: Any, start: int, stop: int) -> Record:
    """Run steps traced."""
    leaves, structure = flatten(state)
    with trace_stack.new_trace() as trace:
        before = [_rooted(leaf, trace) for leaf in leaves]
        captured = [_rooted(value, trace) for value in machine.values]
        record = Record(start, stop, before, leaves=leaves, captured=captured)
        state = unflatten(structure, before)
        record.run(
            machine.seeing(captured), state, lambda part, _: _rooted(part, trace)
        )
        _refuse_foreign(record.after, trace, f"the steps {start} to {stop - 1}")
    return record


def pull_record(machine: NumpyMachine, record: Record) -> None:
    """Pull the machine's cotangents back through traced steps.

    The sums of the captured arrays enter as gradients that have already arrived, so
    they are summed in the order of the plain loop.
    """
    asked = [pair for pair in _asked(machine, record) if isbox(pair[0])]
    parts = [part for part, _ in record.given]
    inputs = [*record.before, *record.captured, *parts]
    found: dict[int, Any] = {}
    if asked:
        end = traced_tuple([box for box, _ in asked])
        found = _pull(end, tuple(cotangent for _, cotangent in asked), inputs)
    machine.cotangents.state = [
        _dense(found, box, leaf)
        for box, leaf in zip(record.before, record.leaves, strict=True)
    ]
    machine.cotangents.captures = [found.get(id(box)) for box in record.captured]
    for part, place in record.given:
        machine.cotangents.add_input(
            place, found.get(id(part)), lambda n: np.zeros_like(machine.step.fed[n])
        )


def without_traces(machine: NumpyMachine) -> None:
    """Raise if the step still refers to a traced array after replacing captures."""
    left = reach(machine.seeing(machine.values).function, kind=Box)
    if left:
        raise CaptureError(
            f"{machine.step.name!r} uses a traced array of shape "
            f"{np.shape(_value(left[0]))} that cannot be replaced by its value: its "
            "gradient would be lost; make it a variable of the function around the "
            "step, or part of the state."
        )


def _asked(machine: NumpyMachine, record: Record) -> list[tuple[Any, Any]]:
    """Return the values with cotangents, and their cotangents."""
    asked = list(zip(record.after, machine.cotangents.state, strict=True))
    for row, outputs in enumerate(record.outputs):
        for place, leaf in enumerate(outputs):
            if machine.cotangents.outputs:
                whole = machine.cotangents.outputs[place]
                asked.append((leaf, whole[record.start + row]))
    asked += zip(record.captured, machine.cotangents.captures, strict=True)
    return [(value, cotangent) for value, cotangent in asked if cotangent is not None]


def _pull(end: Any, cotangents: tuple[Any, ...], inputs: list[Any]) -> dict[int, Any]:
    """Return the gradients of the inputs, by the id of their box."""
    roots = {box._node: id(box) for box in inputs if isbox(box)}  # noqa: SLF001
    found: dict[int, Any] = {}
    arrived: dict[Any, Any] = {end._node: (cotangents, False)}  # noqa: SLF001
    for node in toposort(end._node):  # noqa: SLF001
        gradient, _ = arrived.pop(node)
        if node in roots:
            found[roots[node]] = gradient
            continue
        for parent, part in zip(node.parents, node.vjp(gradient), strict=True):
            arrived[parent] = add_outgrads(arrived.get(parent), part)
    return found


def _rooted(value: Any, trace: int) -> Any:
    if not is_continuous(value):
        return value
    return new_box(value, trace, VJPNode.new_root())


def _refuse_foreign(values: list[Any], trace: int, name: str) -> None:
    for value in values:
        if isbox(value) and value._trace != trace:  # noqa: SLF001
            raise CaptureError(
                f"{name} of a checkpointed loop use a traced array that the function "
                "around them does not name: its gradient would be lost; make it a "
                "variable of that function, or part of the state."
            )


def _value(box: Any) -> Any:
    return box._value if isbox(box) else box  # noqa: SLF001


def _dense(found: dict[int, Any], box: Any, leaf: Any) -> Any:
    gradient = found.get(id(box))
    if gradient is not None:
        return gradient
    return np.zeros_like(leaf) if is_continuous(leaf) else None


@primitive
def loop_node(run: NumpyRun, *values: Any) -> tuple[Any, ...]:
    """Run the loop; the values are state, feed and captures, without traces."""
    run.machine.values = list(values[len(values) - len(run.machine.captured) :])
    without_traces(run.machine)
    results = run.forward(values, traced=True)
    return tuple(results[place] for place in run.continuous)


def _make_pull(
    places: Sequence[int], result: Any, arguments: Sequence[Any], options: Any
) -> Callable[[Any], tuple[Any, ...]]:
    del result, options
    run: NumpyRun = arguments[0]
    values = arguments[1:]

    def pull(cotangents: Any) -> tuple[Any, ...]:
        parts = [cotangents[place] for place in range(len(run.continuous))]
        if any(map(isbox, values)) or any(map(isbox, parts)) or isbox(cotangents):
            # A second derivative is being taken: by one plain loop.
            make: Any = make_vjp  # its wrapper hides what it returns
            pulled, _ = make(_plain_loop(run))(traced_tuple(values))
            found = pulled(traced_tuple(parts))
        else:
            full: list[Any] = [None] * len(run.constants)
            for place, part in zip(run.continuous, parts, strict=True):
                full[place] = part
            found = run.backward(values, full)
        return tuple(found[place - 1] for place in places)

    return pull


def _plain_loop(run: NumpyRun) -> Callable[[Any], Any]:
    def whole(values: Any) -> Any:
        machine = run.machine
        count = len(values)
        first = count - len(machine.captured)
        step = machine.seeing([values[place] for place in range(first, count)])
        leaves = [values[place] for place in range(run.leaf_count)]
        fed = {p: values[run.leaf_count + p] for p in range(len(step.fed))}
        final, columns = step.run_plain(leaves, run.structure, fed, run.steps)
        results = [*final, *map(stack, columns)]
        return traced_tuple([results[place] for place in run.continuous])

    return whole


defvjp_argnums(loop_node, _make_pull)

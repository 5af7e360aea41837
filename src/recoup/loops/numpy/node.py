"""Autograd node: a checkpointed loop as one primitive of HIPS autograd."""

from collections.abc import Callable, Sequence
from typing import Any

from autograd import make_vjp
from autograd.builtins import tuple as traced_tuple
from autograd.extend import defvjp_argnums, primitive
from autograd.numpy import stack
from autograd.tracer import isbox

from recoup.loops.numpy.loop import NumpyRun
from recoup.loops.numpy.step_tape import without_traces
from recoup.loops.state_trees import flatten, unflatten


@primitive
def loop_node(run: NumpyRun, *values: Any) -> tuple[Any, ...]:
    """Run the loop; the values are state, feed and captures, by now without traces."""
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
            # A derivative of this derivative is being taken: by one plain loop.
            make: Any = make_vjp  # its wrapper hides what it returns
            pulled, _ = make(_plain(run))(traced_tuple(values))
            found = pulled(traced_tuple(parts))
        else:
            full: list[Any] = [None] * len(run.constants)
            for place, part in zip(run.continuous, parts, strict=True):
                full[place] = part
            found = run.backward(values, full)
        return tuple(found[place - 1] for place in places)

    return pull


def _plain(run: NumpyRun) -> Callable[[Any], Any]:
    def whole(values: Any) -> Any:
        machine = run.machine
        count = len(values)
        first = count - len(machine.captured)
        step = machine.seeing([values[place] for place in range(first, count)])
        feed = step.feed
        leaves = [values[place] for place in range(run.leaf_count)]
        state = unflatten(run.structure, leaves)
        if feed is not None:
            places = range(len(feed.leaves))
            feed = feed.with_leaves({p: values[run.leaf_count + p] for p in places})
        rows: list[list[Any]] = []
        for index in range(run.steps):
            given = None if feed is None else feed.at(index)
            state, output = step.run(state, index, given)
            rows.append(flatten(output)[0])
        stacked = []
        if step.with_outputs:
            stacked = [stack(column) for column in zip(*rows, strict=True)]
        results = [*flatten(state)[0], *stacked]
        return traced_tuple([results[place] for place in run.continuous])

    return whole


defvjp_argnums(loop_node, _make_pull)

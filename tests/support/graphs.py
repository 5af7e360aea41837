"""Random graphs of steps and random plans for them, small enough to try everything."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, pairwise

from hypothesis import strategies as st

from benchmarks.graphs import Kernel, step_graph
from recoup.core.graph import Graph
from recoup.core.segments import Action, Segment


@st.composite
def graphs(
    draw: st.DrawFn, *, most: int = 7, awkward: bool = True, chains: bool = False
) -> Graph:
    """Return a graph of a few operators, with a boundary wherever one may be.

    Args:
        draw: Given by hypothesis.
        most: The most operators.
        awkward: Some operators cannot be run again, some results cannot be held.
        chains: Each operator reads the one before, and what is saved is its own result.
    """
    count = draw(st.integers(2, most))
    kernels = []
    for number in range(count):
        before = st.integers(-1, number - 1)
        reads = draw(st.sets(before, min_size=1, max_size=2))
        saved = draw(
            st.sets(st.sampled_from(sorted({number, *reads} - {-1}) or [number]))
        )
        if chains:
            reads, saved = {number - 1}, {number}
        usual = not awkward or draw(st.integers(0, 5)) > 0
        replayable = not awkward or draw(st.integers(0, 5)) > 0
        kernels.append(
            Kernel(
                f"op{number}",
                float(draw(st.integers(1, 9))),
                tuple(sorted(reads)),
                draw(st.integers(1, 9)) * 10,
                tuple(sorted(saved)),
                replayable=replayable,
                workspace_bytes=draw(st.integers(0, 2)) * 5,
                holdable=usual,
            )
        )
    inner = draw(st.sets(st.integers(1, count - 1), max_size=3))
    blocks = sorted({0, count, *inner})
    return step_graph(kernels, range(count + 1), blocks=blocks, static_bytes=7)


@st.composite
def plans(draw: st.DrawFn, graph: Graph, *, depth: int = 2) -> tuple[Segment, ...]:
    """Return segments of a graph with actions, perhaps with others inside."""
    last = len(graph.boundaries) - 1
    places = sorted(draw(st.sets(st.integers(0, last), min_size=2, max_size=5)))
    return tuple(
        draw(_segments(graph, start, stop, depth))
        for start, stop in pairwise(places)
        if draw(st.integers(0, 3))
    )


@st.composite
def _segments(
    draw: st.DrawFn, graph: Graph, start: int, stop: int, depth: int
) -> Segment:
    made = [
        value
        for number in graph.operations_between(start, stop)
        for value in graph.operations[number].makes
        if graph.values[value].holdable
    ]
    held = draw(st.sets(st.sampled_from(made), max_size=3)) if made else set()
    inner: tuple[Segment, ...] = ()
    if depth and stop - start > 1 and draw(st.booleans()):
        places = sorted(draw(st.sets(st.integers(start, stop), min_size=2, max_size=4)))
        inner = tuple(
            draw(_segments(graph, a, b, depth - 1)) for a, b in pairwise(places)
        )
    return Segment(start, stop, dict.fromkeys(held, Action.KEEP), inner)


def hold_sets(graph: Graph, start: int, stop: int) -> Iterator[tuple[int, ...]]:
    """Yield every set of values made in an interval that may be held."""
    made = [
        value
        for number in graph.operations_between(start, stop)
        for value in graph.operations[number].makes
        if graph.values[value].holdable
    ]
    yield from chain.from_iterable(
        combinations(made, size) for size in range(len(made) + 1)
    )


def timeless(graph: Graph) -> Graph:
    """Return the graph without its times, which a dry one only estimates."""
    return replace(
        graph,
        operations=tuple(replace(o, seconds=0.0) for o in graph.operations),
        step_seconds=0.0,
        recording_seconds=0.0,
        link_bytes_per_second=0.0,
        estimated_for="",
    )

"""Trimmed segments: they recompute the same, and record less."""

from dataclasses import replace

from hypothesis import event, given, settings
from hypothesis import strategies as st

from benchmarks.graphs import Kernel, step_graph
from recoup.core.footprint import total_footprint
from recoup.core.segments import Action, Segment
from recoup.core.simulation import simulate
from recoup.core.trim_segments import narrowed
from tests.support.graphs import graphs, plans
from tests.support.interpreter import Machine

COUNT = 30


def row_graph():
    """Return a chain of operators that save their arguments, with all boundaries."""
    kernels = [Kernel(f"op{n}", 1.0, (n - 1,), 100, (n - 1,)) for n in range(COUNT)]
    return step_graph(kernels, range(COUNT + 1), link_bytes_per_second=100.0)


def holding_all_but(*recomputed):
    """Return a segment of the whole chain that recomputes some results."""
    kept = {n + 1: Action.KEEP for n in range(COUNT) if n not in recomputed}
    return Segment(0, COUNT, kept)


def places(segments):
    return [(segment.start, segment.stop) for segment in segments]


def test_a_trimmed_segment_covers_recomputed_operators_and_their_saves():
    graph = row_graph()
    assert places(narrowed(graph, holding_all_but(10))) == [(10, 12)]
    assert places(narrowed(graph, holding_all_but(10, 11, 12))) == [(10, 14)]


def test_distant_recomputed_values_get_separate_segments():
    graph = row_graph()
    assert places(narrowed(graph, holding_all_but(5, 20))) == [(5, 7), (20, 22)]
    assert places(narrowed(graph, holding_all_but(5, 12))) == [(5, 14)]


def test_segments_hold_only_values_made_in_them():
    graph = row_graph()
    first, second = narrowed(graph, holding_all_but(5, 6, 20))
    assert set(first.actions) == {8}
    assert set(second.actions) == {22}


def test_a_nested_or_offloading_segment_is_unchanged():
    graph = row_graph()
    moving = Segment(0, COUNT, {3: Action.OFFLOAD})
    nesting = Segment(0, COUNT, {}, (Segment(0, 9),))
    assert narrowed(graph, moving) == (moving,)
    assert narrowed(graph, nesting) == (nesting,)


@settings(max_examples=300)
@given(st.data())
def test_trimming_recomputes_the_same_and_records_less(data):
    graph = data.draw(graphs())
    segments = data.draw(plans(graph, depth=0))
    segments = tuple(
        replace(
            segment,
            actions=dict.fromkeys(segment.actions, Action.KEEP),
        )
        for segment in segments
    )
    narrow = tuple(part for each in segments for part in narrowed(graph, each))
    before, after = simulate(graph, segments), simulate(graph, narrow)
    event(f"{'other' if narrow != segments else 'the same'} segments")
    assert list(after.bytes_at) == Machine(graph, narrow).run()
    ran_before = sorted(n for replay in before.replays for n in replay.operations)
    ran_after = sorted(n for replay in after.replays for n in replay.operations)
    assert ran_after == ran_before
    recorded = total_footprint(graph, narrow).recorded
    assert recorded <= total_footprint(graph, segments).recorded
    assert after.held_bytes <= before.held_bytes

"""Segments that save nothing: removing them makes no plan worse."""

from dataclasses import replace

from hypothesis import event, given, settings
from hypothesis import strategies as st

from benchmarks.graphs import Kernel, step_graph
from recoup.core.segments import Action, Segment
from recoup.core.simulation import simulate
from recoup.core.trim_segments import is_idle
from tests.support.graphs import graphs, plans


@settings(max_examples=300)
@given(st.data())
def test_removing_idle_segments_adds_no_bytes_and_records_less(data):
    graph = replace(data.draw(graphs()), recording_seconds=1.0)
    segments = data.draw(plans(graph, depth=data.draw(st.integers(0, 2))))
    if data.draw(st.booleans()):
        segments = tuple(holding_everything(graph, segment) for segment in segments)
    busy = [segment for segment in segments if not is_idle(graph, segment)]
    before, after = simulate(graph, segments), simulate(graph, busy)
    event(f"{len(segments) - len(busy)} are idle")
    assert all(
        more >= less for more, less in zip(before.bytes_at, after.bytes_at, strict=True)
    )
    assert before.replays == after.replays
    assert before.host_bytes == after.host_bytes
    if len(busy) < len(segments):
        assert after.seconds < before.seconds


def holding_everything(graph, segment):
    inside = graph.operations_between(segment.start, segment.stop)
    made = [n for n, value in enumerate(graph.values) if value.producer in inside]
    return Segment(segment.start, segment.stop, dict.fromkeys(made, Action.KEEP))


def test_a_segment_that_recomputes_or_offloads_is_not_idle():
    kernels = [Kernel(f"op{n}", 1.0, (n - 1,), 100, (n,)) for n in range(4)]
    graph = step_graph(kernels, range(5), link_bytes_per_second=100.0)
    kept = dict.fromkeys(range(1, 5), Action.KEEP)
    assert is_idle(graph, Segment(0, 4, kept))
    assert not is_idle(graph, Segment(0, 4, kept | {1: Action.OFFLOAD}))
    del kept[2]
    assert not is_idle(graph, Segment(0, 4, kept))

"""The bands of a timeline add up to the simulation, in every column."""

import dataclasses

import pytest

from recoup.core.segments import Action, Segment
from recoup.core.simulation import simulate
from recoup.planners.every_kth import every_kth
from recoup.planners.plan import frontier
from recoup.planners.recompute_all import recompute_all
from recoup.planners.square_root import square_root
from recoup.report.block_rows import block_rows
from recoup.report.timeline import BANDS, COLUMNS, timeline
from tests.support.findings import named_graph, small_graph


def plans():
    graph = small_graph()
    whole = Segment(0, len(graph.boundaries) - 1)
    start, stop = graph.blocks[1], graph.blocks[2]
    inside = graph.operations_between(start, stop)
    (made, *_) = (
        save.value
        for save in graph.saves_between(start, stop)
        if graph.values[save.value].producer in inside
    )
    yield "plain", ()
    yield "all", recompute_all(graph)
    yield "some", every_kth(graph, 2)
    yield "root", square_root(graph)
    yield "whole", (whole,)
    yield "nested", (Segment(whole.start, whole.stop, inner=recompute_all(graph)),)
    yield "kept", (Segment(start, stop, actions={made: Action.KEEP}),)
    yield "offloaded", (Segment(start, stop, actions={made: Action.OFFLOAD}),)
    yield "planned", frontier(graph, points=3)[0].segments


@pytest.mark.parametrize("name", [name for name, _ in plans()])
def test_the_bands_add_up_to_the_simulation(name):
    graph, segments = small_graph(), dict(plans())[name]
    costs = simulate(graph, segments)
    drawn = timeline(graph, segments, resident=[("parameters", 5000)])
    sums = [
        sum(column) for column in zip(*(x.bytes_at for x in drawn.layers), strict=True)
    ]
    assert sums == [costs.bytes_at[moment] for moment in drawn.moments]
    assert drawn.peak_bytes == costs.peak_bytes
    assert drawn.peak_moment == costs.peak_moment
    assert sum(nbytes for _, nbytes in drawn.alive) == costs.peak_bytes
    assert drawn.peak_moment in drawn.moments
    assert len(drawn.moments) <= COLUMNS
    assert sum(layer.category == "held" for layer in drawn.layers) <= BANDS


def test_no_band_is_below_nothing_even_where_less_was_measured_than_accounted_for():
    graph = dataclasses.replace(named_graph("mm"), other_bytes=(-50, -60, -40, 5))
    drawn = timeline(graph, (), resident=[("parameters", 30)])
    assert all(nbytes >= 0 for layer in drawn.layers for nbytes in layer.bytes_at)
    assert drawn.layers[0].bytes_at == (30,) * 4
    columns = zip(*(layer.bytes_at for layer in drawn.layers), strict=True)
    expected = simulate(graph, ()).bytes_at
    assert [sum(column) for column in columns] == [expected[m] for m in drawn.moments]


def test_reserved_bytes_are_a_band_of_their_own():
    graph = small_graph()
    reserved = timeline(graph, (), reserved_bytes=1000)
    assert reserved.peak_bytes == simulate(graph, ()).peak_bytes + 1000


@pytest.mark.parametrize("name", [name for name, _ in plans()])
def test_a_row_of_a_block_adds_up_to_what_autograd_saves_there(name):
    graph, segments = small_graph(), dict(plans())[name]
    rows = block_rows(graph, segments)
    assert sum(row.saved_bytes for row in rows) == graph.saved_bytes
    for row in rows:
        parts = row.kept_bytes + row.offloaded_bytes + row.recomputed_bytes
        assert parts == row.saved_bytes
    costs = simulate(graph, segments)
    assert sum(row.replay_seconds for row in rows) == pytest.approx(
        costs.replay_seconds, rel=1e-12
    )  # the same terms in another order
    assert sum(row.operators for row in rows) == len(graph.operations)


def test_what_a_plan_keeps_is_told_from_what_it_computes_again():
    graph = small_graph()
    plain = block_rows(graph, ())
    assert {row.action for row in plain} <= {"keep", "nothing saved"}
    again = block_rows(graph, recompute_all(graph))
    assert any(row.action.startswith("recompute") for row in again)
    offloaded = block_rows(graph, dict(plans())["offloaded"])
    assert sum(row.offloaded_bytes for row in offloaded) > 0

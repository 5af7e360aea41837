"""The bands of a timeline add up to the simulation, in every column."""

import dataclasses

import pytest

from recoup.core.segments import Action, Segment
from recoup.core.simulation import simulate
from recoup.planners.baselines import every_kth, recompute_all, square_root
from recoup.planners.planner import frontier
from recoup.report.composition import Known, compose
from recoup.report.modules import block_rows
from recoup.report.timeline import BANDS, COLUMNS, Timeline, timeline
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


def found_for(graph, segments, **known):
    return compose(graph, [segments], known=Known(**known))


def drawn_for(graph, segments, **known) -> Timeline:
    found = found_for(graph, segments, **known)
    return timeline(found.step, found.plan)


@pytest.mark.parametrize("name", [name for name, _ in plans()])
def test_the_bands_add_up_to_the_simulation(name):
    graph, segments = small_graph(), dict(plans())[name]
    costs = simulate(graph, segments)
    drawn = drawn_for(graph, segments, resident=(("parameters", 5000),))
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


@pytest.mark.parametrize("name", [name for name, _ in plans()])
def test_the_tensors_add_up_to_the_simulation_at_every_moment(name):
    graph, segments = small_graph(), dict(plans())[name]
    found = found_for(graph, segments)
    sums: list[int] = [moment.other_bytes for moment in found.step.moments]
    for each in found.plan.allocations:
        for moment in range(each.first, each.last + 1):
            sums[moment] += each.bytes
    assert tuple(sums) == simulate(graph, segments).bytes_at


def test_passes_are_shown_in_order_and_the_highest_has_the_peak():
    one = small_graph()
    larger = tuple(n + 10**6 for n in one.other_bytes)
    other = dataclasses.replace(one, other_bytes=larger)
    graph = dataclasses.replace(one, others=(other,), order=(1, 0))
    found = compose(graph, [recompute_all(one), ()])
    assert [name for name, _ in found.step.phases] == [
        *("forward 1", "backward 1", "forward 2", "backward 2")
    ]
    expected = (
        *simulate(other, ()).bytes_at,
        *simulate(one, recompute_all(one)).bytes_at,
    )
    drawn = timeline(found.step, found.plan)
    sums = [sum(c) for c in zip(*(x.bytes_at for x in drawn.layers), strict=True)]
    assert sums == [expected[moment] for moment in drawn.moments]
    assert found.plan.peak_bytes == max(expected)
    assert expected[found.plan.peak_moment] == max(expected)
    # The active plan is that of the second pass.
    assert found.plan.reruns
    assert all(rerun.moment >= one.moments for rerun in found.plan.reruns)


def test_every_operator_of_forward_has_its_module():
    found = found_for(small_graph(), ())
    moments = found.step.moments[: len(small_graph().operations)]
    named = [
        (found.step.operators[m.operator], found.step.parts[m.part].module)
        for m in moments
    ]
    inside = [pair for pair in named if pair[1]]
    kinds = ["aten.addmm.default", "aten.tanh.default", "aten.addmm.default"]
    # The last layer of a block and the block end at one place of the graph.
    paths = [f"{n // 3}.{n % 3}" if n % 3 < 2 else f"{n // 3}" for n in range(15)]
    assert inside == [(kinds[n % 3], paths[n]) for n in range(15)]


def test_no_band_is_negative_where_fewer_bytes_were_measured_than_accounted_for():
    graph = dataclasses.replace(named_graph("mm"), other_bytes=(-50, -60, -40, 5))
    drawn = drawn_for(graph, (), resident=(("parameters", 30),))
    assert all(nbytes >= 0 for layer in drawn.layers for nbytes in layer.bytes_at)
    assert drawn.layers[0].bytes_at == (30,) * 4
    columns = zip(*(layer.bytes_at for layer in drawn.layers), strict=True)
    expected = simulate(graph, ()).bytes_at
    assert [sum(column) for column in columns] == [expected[m] for m in drawn.moments]


def test_reserved_bytes_have_their_own_band():
    graph = small_graph()
    reserved = drawn_for(graph, (), reserved_bytes=1000)
    assert reserved.peak_bytes == simulate(graph, ()).peak_bytes + 1000


@pytest.mark.parametrize("name", [name for name, _ in plans()])
def test_rows_of_blocks_sum_to_the_bytes_that_autograd_saves(name):
    graph, segments = small_graph(), dict(plans())[name]
    found = found_for(graph, segments)
    rows = block_rows(found.step, found.plan)
    assert sum(row.saved_bytes for row in rows) == graph.saved_bytes
    for row in rows:
        parts = row.kept_bytes + row.offloaded_bytes + row.recomputed_bytes
        assert parts == row.saved_bytes
    costs = simulate(graph, segments)
    assert sum(row.replay_seconds for row in rows) == pytest.approx(
        costs.replay_seconds, rel=1e-12
    )  # the same terms in another order
    assert sum(row.operators for row in rows) == len(graph.operations)


def test_equal_rows_are_merged_into_their_sum():
    found = found_for(small_graph(), recompute_all(small_graph()))
    rows = block_rows(found.step, found.plan)
    joined = block_rows(found.step, found.plan, merge=True)
    assert len(joined) < len(rows)
    for name in ("operators", "saved_bytes", "kept_bytes", "recomputed_bytes"):
        assert sum(getattr(r, name) for r in rows) == sum(
            getattr(r, name) for r in joined
        )


def test_the_action_distinguishes_keeping_from_recomputing():
    graph = small_graph()

    def rows(segments):
        found = found_for(graph, segments)
        return block_rows(found.step, found.plan)

    assert {row.action for row in rows(())} <= {"keep", "nothing saved"}
    again = rows(recompute_all(graph))
    assert any(row.action.startswith("recompute") for row in again)
    offloaded = rows(dict(plans())["offloaded"])
    assert sum(row.offloaded_bytes for row in offloaded) > 0

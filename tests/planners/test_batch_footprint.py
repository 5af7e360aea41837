"""Many sets of held values at once: each costs what the one segment does."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.graphs import transformer_graph
from recoup.core import batch_footprint as flat
from recoup.core.batch_footprint import Costs, costs_of_holding
from recoup.core.graph import Graph
from recoup.planners.interval_options import IntervalOptions, Memory
from recoup.planners.option import holding
from tests.support.graphs import graphs, hold_sets


def in_place(graph: Graph, number: int) -> Graph:
    """Return the graph with one operator that writes over the first value it reads."""
    operation = graph.operations[number]
    old = operation.reads[0]
    new = operation.makes[0]
    values = list(graph.values)
    gone, kept = values[new].storage, values[old].storage
    if values[old].producer < 0:
        return graph
    values[old] = replace(values[old], holdable=False)
    values[new] = replace(values[new], storage=kept)
    storages = list(graph.storages)
    dies = max(storages[kept].dies, storages[gone].dies)
    storages[kept] = replace(storages[kept], dies=dies)
    storages[gone] = replace(storages[gone], bytes=0)
    return replace(graph, values=tuple(values), storages=tuple(storages))


def as_one_segment(options: IntervalOptions, graph: Graph, interval, held) -> Costs:
    return options._costs(interval, holding(graph, interval.first, interval.last, held))


def compare(graph: Graph, first: int, last: int, sets: list[tuple[int, ...]]) -> None:
    interval, _ = Memory().interval(graph, first, last)
    options = IntervalOptions(graph, (first, last), (), nest=False)
    together = costs_of_holding(graph, (first, last), interval.rows, sets)
    assert len(together) == len(sets)
    for found, held in zip(together, sets, strict=True):
        alone = as_one_segment(options, graph, interval, held)
        assert found.replays == alone.replays
        assert found.recorded == alone.recorded
        assert found.held_bytes == alone.held_bytes
        assert found.use.tolist() == alone.use.tolist()
        start = interval.inside.start
        option = holding(graph, first, last, held)
        assert found.seconds(graph, start) == option.seconds


@settings(max_examples=150, deadline=None)
@given(data=st.data(), graph=graphs(most=7))
def test_each_set_costs_what_its_segment_does(data, graph):
    if data.draw(st.booleans()):
        graph = in_place(graph, data.draw(st.integers(1, len(graph.operations) - 1)))
    if data.draw(st.booleans()):
        own = [data.draw(st.integers(0, 30)) for _ in range(graph.moments)]
        graph = replace(graph, own_bytes=tuple(own), recording_seconds=0.25)
    last = len(graph.boundaries) - 1
    first, last = sorted(
        data.draw(st.sets(st.integers(0, last), min_size=2, max_size=2))
    )
    compare(graph, first, last, list(hold_sets(graph, first, last))[:100])


def test_blocks_of_a_transformer_cost_what_their_segments_do():
    graph = transformer_graph(3)
    made = [v for o in graph.operations for v in o.makes if graph.values[v].holdable]
    for first, last in ((0, 1), (0, 2), (1, 3)):
        places = graph.blocks[first], graph.blocks[last]
        inside = graph.operations_between(*places)
        mine = [v for v in made if graph.values[v].producer in inside]
        compare(
            graph,
            *places,
            [tuple(mine[n::step]) for step in (1, 2, 3) for n in range(step)],
        )


def test_more_sets_than_an_integer_has_bits_are_worked_out_in_parts(monkeypatch):
    graph = transformer_graph(2)
    places = graph.blocks[0], graph.blocks[1]
    interval, _ = Memory().interval(graph, *places)
    sets = [*hold_sets(graph, *places)][:9]
    whole = costs_of_holding(graph, places, interval.rows, sets)
    monkeypatch.setattr(flat, "_MOST", 4)
    parts = costs_of_holding(graph, places, interval.rows, sets)
    assert len(parts) == len(whole) == 9
    for one, other in zip(whole, parts, strict=True):
        assert one.replays == other.replays
        assert np.array_equal(one.use, other.use)

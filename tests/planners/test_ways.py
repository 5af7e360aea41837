"""Ways to run stretches: working alike stretches out once changes no figure."""

from itertools import pairwise

from hypothesis import given, settings

from benchmarks.graphs import transformer_graph
from recoup.core.footprint import footprint
from recoup.core.graph import Graph
from recoup.planners.partition import Partition
from recoup.planners.ways import Way, Ways
from tests.support.graphs import graphs


def held_sets(graph: Graph) -> list[set[int]]:
    made = [v for o in graph.operations for v in o.makes if graph.values[v].holdable]
    return [set(made[::3]), set(made[::2]), set(made)]


def figures(ways: list[Way]) -> list[tuple[float, int, int]]:
    return [(way.seconds, way.held_bytes, way.peak_bytes) for way in ways]


def compare(graph: Graph, places: list[int], *, nest: bool) -> int:
    """Compare every stretch with one that is worked out alone; say how many."""
    shared = Ways(graph, places, held_sets(graph), nest=nest)
    count = 0
    for stop in range(1, len(places)):
        for start in range(max(0, stop - 3), stop):
            alone = Ways(graph, places, held_sets(graph), nest=nest)
            found = shared.between(start, stop)
            assert figures(found) == figures(alone.between(start, stop))
            for way in found:
                assert way.seconds == way.make().seconds
            count += 1
    return count


@settings(max_examples=40, deadline=None)
@given(graph=graphs(most=9))
def test_ways_of_any_stretch_are_those_of_the_stretch_alone(graph):
    assert compare(graph, list(range(len(graph.boundaries))), nest=True)


def test_ways_of_blocks_that_repeat_are_those_of_the_block_alone():
    graph = transformer_graph(4)
    assert compare(graph, list(graph.blocks), nest=True)


def test_blocks_that_repeat_are_worked_out_once(monkeypatch):
    worked: list[object] = []
    costs = Ways._costs

    def counting(ways, stretch, option):
        worked.append(option)
        return costs(ways, stretch, option)

    monkeypatch.setattr(Ways, "_costs", counting)
    counts = []
    for blocks in (6, 12):
        worked.clear()
        graph = transformer_graph(blocks)
        Partition(graph, graph.blocks, reach=3)
        counts.append(len(worked))
    assert counts[0] > 0
    assert counts[1] <= 1.5 * counts[0]


def test_a_path_is_made_of_segments_that_cost_what_its_ways_say():
    graph = transformer_graph(3)
    partition = Partition(graph, graph.blocks, reach=3)
    path = partition.best(partition.lowest())
    assert path is not None
    for (_, stop), (start, _) in pairwise(stretch for stretch, _ in path):
        assert stop == start
    for _, option in path:
        for segment in option.segments:
            replays = footprint(graph, segment).replays
            assert replays == option.footprint.replays

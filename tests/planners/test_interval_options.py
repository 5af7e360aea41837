"""Options of intervals: sharing equal intervals changes no figure."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings

from benchmarks.graphs import transformer_graph
from recoup.core.footprint import footprint
from recoup.core.graph import Graph
from recoup.planners.interval_options import IntervalOption, IntervalOptions, Memory
from recoup.planners.partition import Partition
from tests.support.graphs import graphs


def held_sets(graph: Graph) -> list[set[int]]:
    made = [v for o in graph.operations for v in o.makes if graph.values[v].holdable]
    return [set(made[::3]), set(made[::2]), set(made)]


def figures(options: list[IntervalOption]) -> list[tuple[float, int, int]]:
    return [
        (option.seconds, option.held_bytes, option.peak_bytes) for option in options
    ]


def compare(graph: Graph, places: list[int], *, nest: bool) -> int:
    """Compare every interval with one evaluated alone; return their number."""
    shared = IntervalOptions(graph, places, held_sets(graph), nest=nest)
    count = 0
    for stop in range(1, len(places)):
        for start in range(max(0, stop - 3), stop):
            alone = IntervalOptions(graph, places, held_sets(graph), nest=nest)
            found = shared.between(start, stop)
            assert figures(found) == figures(alone.between(start, stop))
            for option in found:
                assert option.seconds == option.make().seconds
            count += 1
    return count


@settings(max_examples=40, deadline=None)
@given(graph=graphs(most=9))
def test_options_of_any_interval_equal_those_of_the_interval_alone(graph):
    assert compare(graph, list(range(len(graph.boundaries))), nest=True)


def test_options_of_repeated_blocks_equal_those_of_the_block_alone():
    graph = transformer_graph(4)
    assert compare(graph, list(graph.blocks), nest=True)


def test_repeated_blocks_are_evaluated_once():
    counts = []
    for blocks in (6, 12):
        memory = Memory()
        graph = transformer_graph(blocks)
        Partition(graph, graph.blocks, reach=3, memory=memory)
        counts.append(len(memory.costs))
    assert counts[0] > 0
    assert counts[1] <= 1.5 * counts[0]


def test_segments_of_a_path_cost_what_its_options_state():
    graph = transformer_graph(3)
    partition = Partition(graph, graph.blocks, reach=3)
    path = partition.best(partition.lowest())
    assert path is not None
    for (_, stop), (start, _) in pairwise(interval for interval, _ in path):
        assert stop == start
    for _, option in path:
        for segment in option.segments:
            replays = footprint(graph, segment).replays
            assert replays == option.footprint.replays


@settings(max_examples=40, deadline=None)
@given(graph=graphs(most=8))
def test_the_lowest_budget_is_the_smallest_with_a_path(graph):
    places = list(range(len(graph.boundaries)))
    partition = Partition(graph, places, reach=4, nest=True)
    lowest = partition.lowest()
    assert partition.best(lowest) is not None
    assert partition.best(lowest - max(1, lowest // 10_000)) is None


def test_partitions_with_a_shared_cache_have_the_paths_of_separate_ones():
    graph = transformer_graph(4)
    slower = replace(
        graph,
        operations=tuple(
            replace(o, seconds=o.seconds * (1 + n % 3))
            for n, o in enumerate(graph.operations)
        ),
    )
    memory = Memory()
    for step in (graph, slower):
        for nest in (False, True):
            shared = Partition(step, graph.blocks, reach=3, nest=nest, memory=memory)
            alone = Partition(step, graph.blocks, reach=3, nest=nest)
            for share in (1.0, 1.2, 1.5):
                budget_bytes = int(share * alone.lowest())
                path, other = shared.best(budget_bytes), alone.best(budget_bytes)
                assert path is not None
                assert other is not None
                assert [(s, o.segments) for s, o in path] == [
                    (s, o.segments) for s, o in other
                ]

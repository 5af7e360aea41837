"""The baselines: their promises, on a step that is easy to follow."""

import pytest

from benchmarks.graphs import transformer_graph
from recoup.core.simulation import simulate
from recoup.errors import UsageError
from recoup.planners.baselines import (
    every_kth,
    greedy,
    recompute_all,
    square_root,
    store_all,
)


@pytest.fixture(scope="module")
def graph():
    return transformer_graph(9)


def test_store_all_replays_nothing(graph):
    assert simulate(graph, store_all(graph)).replay_seconds == 0


def test_recompute_all_recomputes_each_operator_at_most_once(graph):
    replays = simulate(graph, recompute_all(graph)).replays
    operations = [number for replay in replays for number in replay.operations]
    assert len(operations) == len(set(operations))
    assert len(replays) == 9


@pytest.mark.parametrize("k", [1, 2, 3, 9])
def test_every_kth_recomputes_one_of_k_blocks(graph, k):
    assert len(simulate(graph, every_kth(graph, k)).replays) == -(-9 // k)


def test_every_kth_refuses_k_below_one(graph):
    with pytest.raises(UsageError, match="at least 1"):
        every_kth(graph, 0)


def test_square_root_makes_equal_numbers_of_segments_and_blocks_per_segment(graph):
    assert len(square_root(graph)) == 3


def test_greedy_recomputes_the_fewest_blocks_that_meet_the_budget(graph):
    plain = simulate(graph, ()).peak_bytes
    counts = []
    for share in (1.0, 0.8, 0.6, 0.4):
        segments = greedy(graph, int(share * plain))
        assert simulate(graph, segments).peak_bytes <= share * plain
        if segments:
            fewer = simulate(graph, segments[1:]).peak_bytes
            assert fewer > share * plain
        counts.append(len(segments))
    assert counts == sorted(counts)

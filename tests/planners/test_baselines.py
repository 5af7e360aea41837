"""The baselines: what each of them promises, on a step one can follow."""

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


def test_recompute_all_runs_no_operator_twice_again(graph):
    replays = simulate(graph, recompute_all(graph)).replays
    operations = [number for replay in replays for number in replay.operations]
    assert len(operations) == len(set(operations))
    assert len(replays) == 9


@pytest.mark.parametrize("k", [1, 2, 3, 9])
def test_every_kth_recomputes_one_of_k_blocks(graph, k):
    assert len(simulate(graph, every_kth(graph, k)).replays) == -(-9 // k)


def test_every_kth_refuses_a_k_of_nothing(graph):
    with pytest.raises(UsageError, match="at least 1"):
        every_kth(graph, 0)


def test_square_root_makes_as_many_segments_as_each_has_blocks(graph):
    assert len(square_root(graph)) == 3


def test_greedy_takes_as_few_blocks_as_meet_the_budget(graph):
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

"""Replays: their operators, and their bytes at their moment."""

from benchmarks.graphs import Kernel, step_graph
from recoup.core.footprint import replayed
from recoup.core.replays import Passing, Replay, run_again, spikes
from recoup.core.segments import Segment


def chain(count=4):
    kernels = [Kernel(f"op{n}", 1.0, (n - 1,), 100, (n,)) for n in range(count)]
    return step_graph(kernels, range(count + 1))


def test_a_replay_starts_from_held_values():
    graph = chain()
    assert replayed(graph, range(4), [4], {}) == ([0, 1, 2, 3], [0])
    assert replayed(graph, range(4), [4], {2: None}) == ([2, 3], [2])
    assert replayed(graph, range(2, 4), [4, 1], {}) == ([2, 3], [1, 2])


def test_intermediates_are_freed_at_their_last_use():
    graph = chain()
    assert run_again(graph, range(4), {4}) == (200, 4.0)
    assert run_again(graph, range(4), {2, 4}) == (300, 4.0)


def test_unshared_roots_are_freed_at_their_last_use():
    graph = chain()
    assert run_again(graph, [2, 3], {4}, fetched=[2]) == (200, 2.0)
    assert run_again(graph, [3], {4}, fetched=[2, 3]) == (300, 1.0)


def replay(depth, *, peak_bytes, left_bytes=0, fetched_bytes=0):
    return Replay(
        Segment(0, 1),
        7,
        (),
        peak_bytes,
        0.0,
        left_bytes=left_bytes,
        depth=depth,
        fetched_bytes=fetched_bytes,
    )


def test_an_inner_replay_runs_after_the_one_around_it():
    together = [
        replay(0, peak_bytes=50, left_bytes=10),
        replay(1, peak_bytes=30, left_bytes=5),
    ]
    # 50 for the outer one, then 10 and 30; the 15 left over are not part of a spike.
    assert spikes(together, ()) == {7: 50 - 15}


def test_a_passed_storage_counts_until_the_replay_that_frees_it():
    together = [replay(0, peak_bytes=50), replay(1, peak_bytes=45, fetched_bytes=20)]
    # Made earlier: it is in use during the outer replay.
    assert spikes(together, [Passing(0, 20, (5, 0), (7, 1))]) == {7: 70}
    # Made by the outer replay: part of its bytes.
    assert spikes(together, [Passing(0, 20, (7, 0), (7, 1))]) == {7: 50}
    # Freed at another moment: not counted.
    assert spikes(together[:1], [Passing(0, 20, (5, 0), (8, 1))]) == {7: 50}


def test_among_disjoint_replays_the_largest_counts_with_all_left_bytes():
    together = [
        replay(0, peak_bytes=50, left_bytes=10),
        replay(0, peak_bytes=40, left_bytes=30),
    ]
    assert spikes(together, ()) == {7: 40}

"""The simulator versus a reference machine that runs the plan, and its laws."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.graphs import Kernel, step_graph
from recoup.core.footprint import Footprint, footprint
from recoup.core.segments import Action, Segment
from recoup.core.simulation import add_up, simulate
from recoup.errors import UsageError
from tests.support.graphs import graphs, plans
from tests.support.interpreter import Machine


@settings(max_examples=250)
@given(st.data())
def test_bytes_and_seconds_equal_those_of_the_reference_machine(data):
    graph = data.draw(graphs())
    segments = data.draw(plans(graph, depth=data.draw(st.integers(0, 3))))
    machine = Machine(graph, segments)
    found = simulate(graph, segments)
    assert list(found.bytes_at) == machine.run()
    assert found.replay_seconds == machine.seconds


def chain_graph(count=4, *, link_bytes_per_second=0.0, blocks=()):
    """Return a chain of operators that each save a result of 100 bytes."""
    kernels = [Kernel(f"op{n}", 1.0, (n - 1,), 100, (n,)) for n in range(count)]
    return step_graph(
        kernels,
        range(count + 1),
        blocks=blocks,
        link_bytes_per_second=link_bytes_per_second,
    )


def test_the_reference_machine_distinguishes_plans():
    graph = chain_graph()
    plain = Machine(graph, ()).run()
    assert plain != Machine(graph, (Segment(0, 2),)).run()
    assert plain != list(simulate(graph, [Segment(0, 2)]).bytes_at)


def test_a_nested_segment_is_replayed_from_values_of_the_outer_replay():
    graph = chain_graph(8)
    inner = (Segment(0, 4), Segment(4, 8))
    flat = simulate(graph, inner)
    nested = simulate(graph, [Segment(0, 8, inner=inner)])
    # All eight for the flat plan; the first four again for the root of the second.
    assert flat.replay_seconds == 8
    assert nested.replay_seconds == 12
    assert nested.held_bytes == flat.held_bytes - 100


def test_an_outer_segment_drops_values_that_an_inner_one_keeps():
    graph = chain_graph(4)
    inner = Segment(0, 4, {2: Action.KEEP})
    both = Segment(0, 4, {2: Action.KEEP}, inner=(inner,))
    dropped = simulate(graph, [Segment(0, 4, inner=(inner,))])
    kept = simulate(graph, [both])
    assert dropped.held_bytes == 0
    assert kept.held_bytes == 100
    assert kept.replay_seconds < dropped.replay_seconds


def test_the_outermost_region_holds_while_an_inner_one_is_alive():
    graph = chain_graph(4)
    inner = Segment(0, 3)
    (held,) = graph.operations[3].makes
    found = simulate(graph, [Segment(0, 4, {held: Action.KEEP}, (inner,))])
    twin = simulate(graph, [Segment(0, 4, {held: Action.KEEP})])
    # Its last tensor is released with the first operator's, at the end of backward.
    assert found.settled_at[-1] == twin.settled_at[-1]
    assert found.settled_at[-1] == 100 + simulate(graph, [inner]).settled_at[-1]


def test_any_request_to_an_inner_region_starts_a_replay():
    kernels = [
        Kernel("first", 1.0, (-1,), 100, (0,)),
        Kernel("second", 1.0, (-1,), 10, (1,)),
        Kernel("third", 1.0, (0, 1), 1, (2,)),
    ]
    graph = step_graph(kernels, range(4))
    middle = Segment(0, 2, inner=(Segment(1, 2),))
    found = simulate(graph, [Segment(0, 3, inner=(middle,))])
    # The second operator's backward requests the input from the innermost region, and
    # that from the middle one; it comes from outside both.
    moments = {replay.depth: replay.moment for replay in found.replays}
    assert moments[1] == moments[2] == graph.moments - 2


def test_a_replay_frees_its_roots_at_their_last_use():
    graph = chain_graph(4)
    inner = Segment(2, 4)
    found = simulate(graph, [Segment(0, 4, inner=(inner,))])
    replays = {replay.depth: replay for replay in found.replays}
    assert replays[1].fetched_bytes == 0, "autograd needs it, too"
    alone = step_graph(
        [
            Kernel(f"op{n}", 1.0, (n - 1,), 100, (3,) if n == 3 else ())
            for n in range(4)
        ],
        range(5),
    )
    found = simulate(alone, [Segment(0, 4, inner=(inner,))])
    replays = {replay.depth: replay for replay in found.replays}
    # Its input and the first result; then that and the second.
    assert replays[1].fetched_bytes == 100
    assert replays[1].peak_bytes == 200


@given(st.data())
def test_footprints_sum_to_the_simulation(data):
    graph = data.draw(graphs())
    segments = data.draw(plans(graph))
    total = Footprint()
    position = 0
    for segment in segments:
        for save in graph.saves[position : graph.boundaries[segment.start].saves]:
            total.hold(graph, save)
        position = graph.boundaries[segment.stop].saves
        part = footprint(graph, segment)
        for storage, last in part.holds.items():
            total.holds[storage] = max(total.holds.get(storage, -1), last)
        total.remade += part.remade
        total.replays += part.replays
        total.recorded += part.recorded
        total.passing += part.passing
    for save in graph.saves[position:]:
        total.hold(graph, save)
    assert add_up(graph, total) == simulate(graph, segments)


def test_an_offloaded_value_leaves_the_device_and_comes_back():
    graph = chain_graph(8, link_bytes_per_second=1e9)
    keep = simulate(graph, [Segment(0, 4, {4: Action.KEEP, 2: Action.KEEP})])
    away = simulate(graph, [Segment(0, 4, {4: Action.KEEP, 2: Action.OFFLOAD})])
    assert away.host_bytes == 100
    assert away.held_bytes == keep.held_bytes - 100
    assert away.replay_seconds == keep.replay_seconds
    assert away.stall_seconds == 0
    turn = len(graph.operations)
    assert away.bytes_at[turn] == keep.bytes_at[turn] - 100
    # It is back when the replay needs it.
    (replay,) = away.replays
    assert away.bytes_at[replay.moment] == keep.bytes_at[replay.moment]


def test_the_step_waits_for_copies_that_computation_does_not_hide():
    graph = chain_graph(4, link_bytes_per_second=20.0)
    away = simulate(graph, [Segment(0, 4, {2: Action.OFFLOAD})])
    # 5 seconds out, of which 4 (a third of 12) are hidden; 5 in, all hidden.
    assert away.stall_seconds == 1.0


def test_overlapping_segments_are_refused():
    with pytest.raises(UsageError, match="in order"):
        simulate(chain_graph(), [Segment(0, 3), Segment(2, 4)])

"""Saved sets of captured blocks: minimum cuts versus all subsets."""

from itertools import chain, combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.core.compiled_plan import JointForward
from recoup.core.graph import BEFORE, Graph, Operation, Storage, Value
from recoup.planners.block_choice import saved_sets


@st.composite
def joints(draw):
    """A random forward of up to six operators, each making one value."""
    inputs = draw(st.integers(1, 2))
    count = draw(st.integers(1, 6))
    values = [Value(number, BEFORE) for number in range(inputs)]
    operations = []
    for number in range(count):
        known = st.sampled_from(range(inputs + number))
        reads = draw(st.lists(known, min_size=1, max_size=2, unique=True))
        values.append(Value(inputs + number, number))
        operations.append(
            Operation(
                f"operator{number}",
                draw(st.integers(0, 9)) / 8,
                tuple(reads),
                (inputs + number,),
                replayable=draw(st.integers(0, 5)) > 0,
            )
        )
    nbytes = draw(
        st.lists(st.integers(1, 9), min_size=len(values), max_size=len(values))
    )
    demanded = draw(
        st.lists(st.sampled_from(range(len(values))), min_size=1, unique=True)
    )
    graph = Graph(
        tuple(operations),
        0,
        tuple(Storage(amount, 0, 0) for amount in nbytes),
        tuple(values),
        (),
        (),
        (0,) * count,
    )
    return JointForward(
        "digest",
        graph,
        tuple(f"value{number}" for number in range(len(values))),
        tuple(sorted(demanded)),
        frozenset(draw(st.lists(st.sampled_from(range(inputs)), unique=True))),
        tuple(draw(st.integers(0, 3)) / 8 for _ in values),
    )


def cost_of(joint, saved):
    """Return (bytes, seconds) of saving some values; None if that is not enough."""
    graph = joint.graph
    used, replayed = set(), set()
    pending = list(joint.demanded)
    while pending:
        value = pending.pop()
        producer = graph.values[value].producer
        if value in saved or producer == BEFORE:
            used.add(value)
        elif not graph.operations[producer].replayable:
            return None
        elif producer not in replayed:
            replayed.add(producer)
            pending.extend(graph.operations[producer].reads)
    nbytes = sum(graph.bytes_of(v) for v in used if v not in joint.resident)
    seconds = sum(graph.operations[number].seconds for number in replayed)
    return nbytes, seconds + sum(joint.save_seconds[value] for value in used)


def all_costs(joint):
    made = [v for v, value in enumerate(joint.graph.values) if value.producer != BEFORE]
    subsets = chain.from_iterable(
        combinations(made, size) for size in range(len(made) + 1)
    )
    costs = (cost_of(joint, set(subset)) for subset in subsets)
    return [cost for cost in costs if cost is not None]


@given(joints())
@settings(max_examples=150)
def test_the_ends_of_the_front_are_the_fastest_and_the_smallest_of_all_subsets(joint):
    found = saved_sets(joint)
    every = all_costs(joint)
    assert abs(found[0].seconds - min(seconds for _, seconds in every)) < 1e-6
    assert found[-1].held_bytes == min(nbytes for nbytes, _ in every)


@given(joints())
@settings(max_examples=150)
def test_no_subset_beats_a_saved_set_in_bytes_and_time(joint):
    for found in saved_sets(joint):
        assert not any(
            nbytes <= found.held_bytes
            and seconds <= found.seconds
            and (nbytes < found.held_bytes or seconds < found.seconds - 1e-6)
            for nbytes, seconds in all_costs(joint)
        )


@given(joints())
@settings(max_examples=150)
def test_a_saved_set_has_its_stated_cost(joint):
    names = {name: value for value, name in enumerate(joint.names)}
    for found in saved_sets(joint):
        cost = cost_of(joint, {names[name] for name in found.names})
        assert cost is not None, "everything that must not run twice is saved"
        assert cost[0] == found.held_bytes
        assert abs(cost[1] - found.seconds) < 1e-9


@given(joints(), st.integers(2, 4))
def test_a_limit_keeps_the_ends_of_the_front(joint, limit):
    every, few = saved_sets(joint, limit=64), saved_sets(joint, limit=limit)
    assert len(few) <= limit
    assert few[0].held_bytes == every[0].held_bytes
    assert few[-1].held_bytes == every[-1].held_bytes

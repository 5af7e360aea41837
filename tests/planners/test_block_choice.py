"""Options of compiled blocks: the dynamic program versus all combinations."""

from dataclasses import replace
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.core.compiled_plan import BlockFrame, BlockOption, BlockStep, SavedSet
from recoup.planners.block_choice import (
    choose_options,
    compiled_first,
    least_peak,
    offloaded,
    worth_measuring,
)

BYTES = st.integers(0, 20)


@st.composite
def problems(draw):
    """A step of up to four blocks of two kinds, with up to three options each."""

    def option():
        return BlockOption(
            held_bytes=draw(BYTES),
            saves_output=draw(st.booleans()),
            forward_bytes=draw(BYTES),
            backward_bytes=draw(BYTES),
            seconds=draw(st.integers(1, 8)) / 8,
        )

    options = [[option() for _ in range(draw(st.integers(1, 3)))] for _ in range(2)]
    frames = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.integers(0, 1))
        peaks = draw(BYTES) + 40, draw(BYTES) + 40
        frames.append(BlockFrame(kind, options[kind][-1], *peaks, draw(BYTES)))
    outside = tuple(draw(BYTES) + 40 for _ in range(len(frames) + 1))
    return BlockStep(tuple(frames), outside, 10.0), options


@given(problems(), st.integers(20, 140))
@settings(max_examples=300)
def test_the_choice_is_the_fastest_of_all_that_fit(problem, budget):
    step, options = problem
    kinds = [options[frame.kind] for frame in step.frames]
    fitting = [
        step.total_seconds(choice)
        for choice in product(*kinds)
        if step.peak_bytes(choice) <= budget
    ]
    found = choose_options(step, options, budget)
    if found is None:
        assert not fitting
        return
    chosen = [kind[number] for kind, number in zip(kinds, found, strict=True)]
    assert step.peak_bytes(chosen) <= budget
    assert abs(step.total_seconds(chosen) - min(fitting)) < 1e-9


@given(problems(), st.integers(20, 140))
@settings(max_examples=300)
def test_options_are_measured_until_a_choice_is_nearly_optimal(problem, budget):
    """Measurements equal predictions here; each round measures something."""
    step, options = problem
    options = [
        [*(replace(o, is_measured=False) for o in kind[:-1]), kind[-1]]
        for kind in options
    ]
    known = [list(kind) for kind in options]
    while True:
        found, missing = worth_measuring(step, known, budget)
        if not missing:
            break
        for kind, number in missing:
            assert not known[kind][number].is_measured
            known[kind][number] = replace(known[kind][number], is_measured=True)
    best = choose_options(step, options, budget)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        chosen, wanted = (
            [known[f.kind][n] for f, n in zip(step.frames, choice, strict=True)]
            for choice in (found, best)
        )
        assert all(option.is_measured for option in chosen)
        assert step.peak_bytes(chosen) <= budget
        slower = step.total_seconds(chosen) - step.total_seconds(wanted)
        references = sum(frame.reference.seconds for frame in step.frames)
        assert slower <= 0.005 * references + 1e-9


def test_an_option_with_negligible_gain_is_not_measured():
    small = BlockOption(0, False, 10, 10, 1.0)
    fast = BlockOption(100, False, 10, 10, 0.96, is_measured=False)
    much = BlockOption(100, False, 10, 10, 0.5, is_measured=False)
    frames = (BlockFrame(0, small, 50, 50, 0), *(BlockFrame(1, small, 50, 50, 0),) * 9)
    step = BlockStep(frames, (50,) * 11, 30.0)
    measured, missing = worth_measuring(step, [[fast, small], [much, small]], 5000)
    assert measured == (1,) * 10
    assert missing == {(1, 0)}
    closed, missing = worth_measuring(step, [[fast, small], [much, small]], 5000, {1})
    assert (closed, missing) == (measured, set())
    # Without it nothing fits.
    none = [[fast, replace(small, held_bytes=9000)], [small]]
    assert worth_measuring(step, none, 5000, {0}) == (None, {(0, 0)})


@given(problems())
@settings(max_examples=300)
def test_least_peak_is_the_minimum_over_all_choices(problem):
    step, options = problem
    kinds = [options[frame.kind] for frame in step.frames]
    found = least_peak(step, options)
    chosen = [kind[number] for kind, number in zip(kinds, found, strict=True)]
    assert step.peak_bytes(chosen) == min(map(step.peak_bytes, product(*kinds)))


def test_few_bytes_less_for_much_time_are_not_compiled_first():
    held = {"fast": (4000, 1.0), "middle": (2000, 2.0), "lean": (1010, 3.0)}
    sets = [SavedSet((name,), *costs) for name, costs in held.items()]
    assert compiled_first(sets) == 2
    assert compiled_first([*sets, SavedSet((), 1000, 9.0)]) == 2
    assert compiled_first([*sets, SavedSet((), 900, 9.0)]) == 3
    assert compiled_first(sets[:1]) == 0


def test_offloading_hidden_by_computation_costs_no_time():
    kept = BlockOption(600, False, 10, 100, 3.0)
    moved = offloaded(kept, 600, 600.0)
    assert moved == BlockOption(0, False, 10, 700, 3.0)
    slow = offloaded(kept, 600, 300.0)
    assert slow.seconds == 3.0 + 1.0  # two seconds each way: one hides in forward
    frames = (BlockFrame(0, kept, 1000, 1500, 0),) * 3
    step = BlockStep(frames, (500, 1100, 1700, 2300), 9.0)
    small = BlockOption(0, False, 10, 700, 4.5)
    assert choose_options(step, [[kept, small, moved]], 1500) == (2, 2, 2)
    assert choose_options(step, [[kept, small]], 1500) == (1, 1, 0)


@given(problems())
def test_a_step_takes_at_least_the_time_of_its_blocks(problem):
    step, options = problem
    disturbed = replace(step, seconds=0.01)
    for number in range(len(options[0])):
        chosen = [(kind * 3)[number] for kind in (options[f.kind] for f in step.frames)]
        assert disturbed.total_seconds(chosen) >= sum(o.seconds for o in chosen) > 0


@given(problems())
def test_the_reference_options_give_the_measured_peak(problem):
    step, _ = problem
    references = [frame.reference for frame in step.frames]
    measured = [
        *(frame.forward_peak_bytes for frame in step.frames),
        *(frame.backward_peak_bytes for frame in step.frames),
        *step.outside_bytes,
    ]
    assert step.peak_bytes(references) == max(measured)
    assert step.total_seconds(references) == step.seconds

"""NumPy: forward as in the original guide, gradients by autograd or a custom vjp."""

import tracemalloc

import pytest

np = pytest.importorskip("numpy")
autograd = pytest.importorskip("autograd", reason="an optional package")
anp = pytest.importorskip("autograd.numpy")

from recoup import checkpointed_loop  # noqa: E402
from recoup.errors import CaptureError, ClearedError, MismatchError, UsageError  # noqa: E402
from recoup.loops import grad  # noqa: E402
from recoup.schedules import Chunked, Even, Online, Revolve, StoreAll  # noqa: E402


def arrays(seed=0):
    generator = np.random.default_rng(seed)
    state = generator.normal(size=(3, 5))
    matrix = generator.normal(size=(5, 5)) * 0.4
    bias = generator.normal(size=5) * 0.1
    return state, matrix, bias


def model(state, matrix, bias, loop):
    """The guide's recurrence; matrix and bias are captured, the matrix used twice."""

    def step(h):
        return anp.tanh(anp.tanh(h @ matrix + bias) @ matrix)

    return anp.sum(loop(step, state) ** 2)


def plain(steps):
    def loop(step, state):
        for _ in range(steps):
            state = step(state)
        return state

    return loop


def checkpointed(steps, **options):
    return lambda step, state: checkpointed_loop(step, state, steps, **options)[0]


def gradients(loop):
    return autograd.grad(model, (0, 1, 2))(*arrays(), loop)


def equal(found, expected):
    return all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("steps", [1, 2, 10, 37])
def test_gradients_are_bitwise_those_of_the_plain_loop(steps):
    expected = gradients(plain(steps))
    for schedule in (
        StoreAll(steps),
        Even(steps, 3),
        Revolve(steps, slots=3),
        Chunked(steps, slots=2, chunk=4),
    ):
        assert equal(gradients(checkpointed(steps, schedule=schedule)), expected)


def test_the_number_of_evaluations_is_the_stated_one():
    for schedule in (Even(30, 4), Revolve(30, slots=3), Chunked(30, slots=2, chunk=4)):
        calls = 0

        def step(h):
            nonlocal calls
            calls += 1
            return anp.sin(h)

        def total(state, schedule=schedule, step=step):
            return anp.sum(checkpointed_loop(step, state, 30, schedule=schedule)[0])

        autograd.grad(total)(np.ones(3))
        assert calls == schedule.counts().evaluations


def test_a_second_derivative_is_right():
    def second(loop):
        def first(state):
            _, matrix, bias = arrays()
            return anp.sum(autograd.grad(model)(state, matrix, bias, loop) ** 2)

        return autograd.grad(first)(arrays()[0])

    found = second(checkpointed(6, schedule=Even(6, 2)))
    # The terms of six steps are added in another order: autograd gives no promise of
    # its own there. Measured: 4.6e-14 of the smallest, where terms cancel.
    np.testing.assert_allclose(found, second(plain(6)), rtol=1e-13)


def test_inputs_outputs_and_the_index():
    def run(matrix, rows, begin, loop):
        def step(state, index, row):
            state = anp.tanh(state @ matrix + row) / (index + 1)
            return state, anp.sin(state)

        state, outputs = loop(step, begin, rows)
        return anp.sum(state) + anp.sum(outputs**2)

    def plainly(step, state, rows):
        outputs = []
        for index in range(7):
            state, output = step(state, index, rows[index])
            outputs.append(output)
        return state, anp.stack(outputs)

    def checkpointed(step, state, rows):
        return checkpointed_loop(
            step, state, inputs=rows, with_index=True, with_outputs=True
        )[0]

    generator = np.random.default_rng(1)
    arguments = [generator.normal(size=s) for s in ((4, 4), (7, 4), (4,))]
    differentiate = autograd.grad(run, (0, 1, 2))
    found = differentiate(*arguments, checkpointed)
    np.testing.assert_equal(found, differentiate(*arguments, plainly))


def test_a_loop_of_unknown_length():
    def run(state, loop):
        return anp.sum(loop(lambda h: {"x": anp.sin(h["x"]), "n": h["n"] + 1}, state))

    def plainly(step, x):
        state = {"x": x, "n": 0}
        while state["n"] < 50:
            state = step(state)
        return state["x"]

    def checkpointed(step, x):
        final, _ = checkpointed_loop(
            step, {"x": x, "n": 0}, condition=lambda h: h["n"] < 50, schedule=Online(4)
        )
        return final["x"]

    begin = np.array([0.3, 0.4])
    expected = autograd.grad(run)(begin, plainly)
    assert np.array_equal(autograd.grad(run)(begin, checkpointed), expected)


def test_plain_numpy_with_a_custom_vjp():
    def vjp(state, cotangent):
        return cotangent * 1.1 * (1 - np.tanh(state * 1.1 + 0.1) ** 2)

    begin = np.linspace(-1, 1, 8)
    final, checkpoints = checkpointed_loop(
        lambda h: np.tanh(h * 1.1 + 0.1), begin, 20, vjp=vjp
    )
    state, states = begin, []
    for _ in range(20):
        states.append(state)
        state = np.tanh(state * 1.1 + 0.1)
    cotangent = np.ones(8)
    for before in reversed(states):
        cotangent = vjp(before, cotangent)
    assert np.array_equal(final, state)
    assert np.array_equal(checkpoints.pull(np.ones(8)), cotangent)
    assert len(checkpoints) == 4  # pull leaves them


def test_forward_only_needs_no_derivatives_and_counts_once():
    calls = 0

    def step(state):
        nonlocal calls
        calls += 1
        return np.round(state + 0.6)

    final, checkpoints = checkpointed_loop(step, np.zeros(3), 1000)
    assert calls == 1000
    assert final.tolist() == [1000.0] * 3
    assert len(checkpoints) == 31


def test_the_counter_of_the_original_guide_is_detected():
    counter = 0

    def step(state):
        nonlocal counter
        counter += 1
        return state * (1 + counter / 1000)

    def total(state):
        return anp.sum(checkpointed_loop(step, state, 100)[0])

    with pytest.raises(MismatchError, match="the steps 81 to 89"):
        autograd.grad(total)(np.ones(3))


def test_a_step_that_writes_to_its_state():
    def step(state):
        state *= 1.5
        return state

    begin = np.ones(4)
    final, checkpoints = checkpointed_loop(step, begin, 9)
    assert begin.tolist() == [1.0] * 4
    assert final[0] == 1.5**9
    assert [checkpoints[p][0] for p in checkpoints] == [1.5**p for p in checkpoints]
    pulled = checkpointed_loop(
        step, begin, 9, vjp=lambda state, cotangent: cotangent * 1.5
    )[1].pull(np.ones(4))
    assert pulled.tolist() == [1.5**9] * 4


def test_a_captured_array_that_cannot_be_replaced_is_an_error():
    class Registry:
        weight = 0.0

    def total(state, weight):
        Registry.weight = weight
        return anp.sum(checkpointed_loop(lambda h: h * Registry.weight, state, 9)[0])

    for places in (1, (0, 1)):
        with pytest.raises(CaptureError, match="gradient would be lost"):
            autograd.grad(total, places)(np.ones(2), 0.5)


def test_the_states_are_freed_by_backward_and_a_second_one_is_right():
    kept = []

    def vector(state):
        final, checkpoints = checkpointed_loop(anp.sin, state, 30)
        kept.append(checkpoints)
        return final

    found = autograd.jacobian(vector)(np.array([0.1, 0.2, 0.3]))  # three backwards
    expected = autograd.jacobian(lambda x: plain(30)(anp.sin, x))(
        np.array([0.1, 0.2, 0.3])
    )
    assert np.array_equal(found, expected)
    assert len(kept[0]) == 0
    with pytest.raises(ClearedError):
        kept[0].pull(np.ones(3))


def test_a_structure_must_stay_the_same():
    with pytest.raises(UsageError, match="pytree structure"):
        checkpointed_loop(lambda x: (x, x), np.ones(1), 1)
    _, checkpoints = checkpointed_loop(lambda x: x, np.ones(1), 4)
    with pytest.raises(UsageError, match="another structure"):
        checkpoints.pull((np.ones(1), np.ones(1)))


WIDTH = 20_000
STATE_BYTES = 8 * WIDTH


def traced_peak_bytes(run):
    run()
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("budget", [1_000_000, 8_000_000, 40_000_000])
def test_a_budget_is_kept(budget):
    def run():
        def total(state):
            def step(h):
                return anp.tanh(anp.sin(h))

            return anp.sum(checkpointed_loop(step, state, 200, budget=budget)[0])

        return autograd.grad(total)(np.full(WIDTH, 0.5))

    # Measured: 6 to 11 states. The beginning, the end, the cotangents before and after
    # a step, a state on its way into and out of a slot, an operator's temporaries.
    assert traced_peak_bytes(run) <= budget + 12 * STATE_BYTES


def test_a_budget_is_kept_with_a_custom_vjp():
    def step(h):
        return np.sin(h)

    def pull(state, cotangent):
        return cotangent * np.cos(state)

    def run():
        begin = np.full(WIDTH, 0.5)
        final, checkpoints = checkpointed_loop(
            step, begin, 200, budget=budget, vjp=pull
        )
        held.append(len(checkpoints))
        return checkpoints.pull(np.ones_like(final))

    for budget in (1_000_000, 8_000_000):
        held = []
        # As above; and `pull` leaves the states in place that the loop holds.
        assert traced_peak_bytes(run) <= budget + (12 + held[0]) * STATE_BYTES
        assert len(held) == 2


def test_a_budget_gives_the_gradients_of_the_plain_loop_and_few_evaluations():
    calls = 0

    def counted(h):
        nonlocal calls
        calls += 1
        return anp.sin(h)

    def total(state, loop):
        return anp.sum(loop(counted, state) ** 2)

    begin = np.linspace(0, 1, 1000)
    expected = autograd.grad(total)(begin, plain(50))
    most = None
    for budget in ("40kB", "100kB", "10MB"):
        calls = 0
        found = autograd.grad(total)(begin, checkpointed(50, budget=budget))
        assert np.array_equal(found, expected)
        assert most is None or calls <= most
        most = calls
    # Everything on one tape, and two steps to measure it.
    assert most == 50 + 2


def test_a_budget_for_traced_inputs_and_captures():
    def total(matrix, rows, loop):
        def step(state, row):
            return anp.tanh(state @ matrix + row)

        return anp.sum(loop(step, np.ones((2, 5)), rows) ** 2)

    def plainly(step, state, rows):
        for row in rows:
            state = step(state, row)
        return state

    def budgeted(step, state, rows):
        return checkpointed_loop(step, state, inputs=rows, budget="8kB")[0]

    _, matrix, _ = arrays()
    rows = np.random.default_rng(1).normal(size=(30, 5))
    found, expected = (
        autograd.grad(total, (0, 1))(matrix, rows, loop) for loop in (budgeted, plainly)
    )
    assert equal(found, expected)


def test_a_budget_smaller_than_one_tape_is_refused():
    with pytest.raises(UsageError, match="does not hold the tape of one step"):
        checkpointed_loop(anp.sin, np.ones(1000), 10, budget="1kB")


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
def test_numbers_of_any_floating_type_are_differentiated(dtype):
    def checkpointed(x):
        final, _ = checkpointed_loop(lambda h: anp.sin(h) * dtype(0.9), x, 30)
        return anp.real(final)

    def plain(x):
        for _ in range(30):
            x = anp.sin(x) * dtype(0.9)
        return anp.real(x)

    found, expected = (autograd.grad(f)(dtype(1.0)) for f in (checkpointed, plain))
    assert found == expected != 0


def test_a_state_traced_as_a_whole():
    def step(state):
        h, rest = state
        return anp.sin(h), {"sum": rest["sum"] + anp.sum(h)}

    def checkpointed(state):
        return checkpointed_loop(step, state, 30)[0][1]["sum"]

    def plain(state):
        for _ in range(30):
            state = step(state)
        return state[1]["sum"]

    begin = (np.ones(3), {"sum": 0.0})
    found, expected = (autograd.grad(f)(begin) for f in (checkpointed, plain))
    assert np.array_equal(found[0], expected[0])
    assert found[1]["sum"] == expected[1]["sum"] == 1


def test_an_array_that_a_step_keeps_outside_the_state_is_an_error():
    def checkpointed(x):
        kept = []

        def step(state):
            kept.append(anp.sin(state))
            return kept[-1]

        final, _ = checkpointed_loop(step, x, 30)
        return anp.sum(final) + sum(map(anp.sum, kept))

    with pytest.raises(CaptureError, match="keeps an array outside"):
        autograd.grad(checkpointed)(np.ones(2))
    with pytest.raises(CaptureError, match="keeps an array outside"):
        autograd.grad(checkpointed)(0.5)


def test_arrays_of_objects_are_refused_where_a_gradient_would_be_lost():
    def checkpointed(x):
        weights = np.array([x * 2.0, x * 3.0], dtype=object)
        final, _ = checkpointed_loop(lambda h: h * weights, np.ones(2) * x, 10)
        return final[0] + final[1]

    with pytest.raises((UsageError, CaptureError), match="would be lost"):
        autograd.grad(checkpointed)(0.9)


def test_a_tolerance_does_not_accept_nan():
    calls = []

    def step(state):
        calls.append(1)
        return state * (np.nan if len(calls) > 30 else 0.5)

    _, checkpoints = checkpointed_loop(
        step, np.ones(2), 30, tolerance=0.1, vjp=lambda state, cotangent: cotangent
    )
    with pytest.raises(MismatchError):
        checkpoints.pull(np.ones(2))


def appending(x, w):
    found = []
    for index in range(40):
        x = anp.sin(x * w)
        found.append(x * index)
    return anp.stack(found).sum() + x.sum()


def appending_pairs(x, w):
    first, second = [], []
    for _ in range(40):
        x = anp.sin(x * w)
        first.append(x)
        second.append(x * w)
    return (anp.stack(first) * anp.stack(second)).sum()


@pytest.mark.parametrize("function", [appending, appending_pairs])
def test_a_list_that_a_rewritten_loop_appends_to_has_gradients(function):
    x, w = np.linspace(0.1, 0.9, 3), np.linspace(0.8, 1.2, 3)
    small = {"min_loop_size": 2, "num_checkpoints": 4}
    found = grad(function, wrt=(0, 1), checkpoint=small)(x, w)
    expected = autograd.grad(function, (0, 1))(x, w)
    for mine, plain_one in zip(found, expected, strict=True):
        assert np.allclose(mine, plain_one, rtol=1e-12)

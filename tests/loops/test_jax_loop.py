"""JAX: the gradients of the plain scan, inside jit, vmap and grad."""

import pytest

jax = pytest.importorskip("jax", reason="an optional package")
jnp = pytest.importorskip("jax.numpy")
np = pytest.importorskip("numpy")

from recoup import (  # noqa: E402
    MismatchError,
    UnsupportedError,
    UsageError,
    checkpointed_loop,
)
from recoup.schedules import Chunked, Even, Revolve, StoreAll  # noqa: E402


def arrays(seed=0):
    generator = np.random.default_rng(seed)
    state = generator.normal(size=(3, 5))
    matrix = generator.normal(size=(5, 5)) * 0.4
    bias = generator.normal(size=5) * 0.1
    return tuple(jnp.array(a, jnp.float32) for a in (state, matrix, bias))


def model(state, matrix, bias, loop):
    """A recurrence whose matrix and bias are captured, the matrix used twice."""

    def step(h):
        return jnp.tanh(jnp.tanh(h @ matrix + bias) @ matrix)

    return jnp.sum(loop(step, state) ** 2)


def plain(steps):
    def loop(step, state):
        return jax.lax.scan(lambda h, _: (step(h), None), state, length=steps)[0]

    return loop


def checkpointed(schedule):
    return lambda step, state: checkpointed_loop(
        step, state, schedule.steps, schedule=schedule
    )[0]


def gradients(loop, *, jit):
    run = jax.grad(lambda s, m, b: model(s, m, b, loop), (0, 1, 2))
    return (jax.jit(run) if jit else run)(*arrays())


def equal(found, expected):
    return jax.tree.structure(found) == jax.tree.structure(expected) and all(
        bool((a == b).all())
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    )


@pytest.mark.parametrize(
    ("steps", "jit", "schedules"),
    [
        (1, True, [Even(1, 3)]),
        (2, True, [Chunked(2, slots=1, chunk=1)]),
        (23, False, [Revolve(23, slots=3)]),
        (23, True, [StoreAll(23), Even(23, 3), Revolve(23, slots=3)]),
        (23, True, [Chunked(23, slots=2, chunk=4)]),
    ],
)
def test_gradients_are_bitwise_those_of_the_plain_scan(steps, jit, schedules):
    expected = gradients(plain(steps), jit=jit)
    for schedule in schedules:
        assert equal(gradients(checkpointed(schedule), jit=jit), expected), schedule


def test_a_wrong_length_would_be_noticed():
    found = gradients(checkpointed(Revolve(22, slots=3)), jit=True)
    assert not equal(found, gradients(plain(23), jit=True))


def test_inputs_outputs_and_the_index():
    def step(state, index, row):
        state = jnp.tanh(state["h"] + row["x"]) / (index + 1)
        return {"h": state, "n": jnp.int32(index)}, state * row["scale"]

    def plainly(begin, rows):
        def body(state, given):
            index, row = given
            return step(state, index, row)

        indexes = jnp.arange(7, dtype=jnp.int32)
        return jax.lax.scan(body, begin, (indexes, rows))

    def checkpointed(begin, rows):
        return checkpointed_loop(
            step, begin, inputs=rows, with_index=True, with_outputs=True
        )[0]

    def total(h, rows, loop):
        begin = {"h": h, "n": jnp.int32(0)}
        final, outputs = loop(begin, rows)
        return jnp.sum(final["h"]) + jnp.sum(outputs**2), final["n"]

    generator = np.random.default_rng(1)
    begin = jnp.array(generator.normal(size=4), jnp.float32)
    rows = {
        "x": jnp.array(generator.normal(size=(7, 4)), jnp.float32),
        "scale": jnp.array(generator.normal(size=7), jnp.float32),
    }
    differentiate = jax.grad(total, (0, 1), has_aux=True)
    found = differentiate(begin, rows, checkpointed)
    expected = differentiate(begin, rows, plainly)
    assert int(found[1]) == int(expected[1]) == 6
    # XLA fuses the two programs otherwise, so the last bit of a term may differ.
    # Measured: 1.5e-8 of numbers up to 0.6, which is 2.9e-6 of one where terms cancel.
    for one, other in zip(
        jax.tree.leaves(found[0]), jax.tree.leaves(expected[0]), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_it_is_safe_under_vmap():
    def run(state, loop):
        _, matrix, bias = arrays()
        return jax.grad(model)(state, matrix, bias, loop)

    states = jnp.stack([arrays(seed)[0] for seed in range(4)])
    found = jax.vmap(lambda s: run(s, checkpointed(Revolve(12, slots=3))))(states)
    expected = jax.vmap(lambda s: run(s, plain(12)))(states)
    assert equal(found, expected)


def test_vmap_over_a_captured_array():
    def run(bias, loop):
        state, matrix, _ = arrays()
        return jax.grad(model, 2)(state, matrix, bias, loop)

    biases = jnp.stack([arrays(seed)[2] for seed in range(3)])
    found = jax.vmap(lambda b: run(b, checkpointed(Chunked(12, slots=2, chunk=3))))(
        biases
    )
    assert equal(found, jax.vmap(lambda b: run(b, plain(12)))(biases))


def test_checkpoints_hold_the_states_and_pull():
    begin = jnp.zeros(())
    final, checkpoints = checkpointed_loop(lambda x: x + 1, begin, 100)
    assert float(final) == 100
    assert len(checkpoints) == 10
    assert all(float(state) == position for position, state in checkpoints.items())
    _, checkpoints = checkpointed_loop(lambda x: x * 1.5, jnp.ones(2), 4)
    assert checkpoints.pull(jnp.ones(2)).tolist() == [1.5**4] * 2


def test_a_condition_outside_of_jit_and_inside():
    def total(x, loop):
        return jnp.sum(loop(jnp.cos, x))

    def checkpointed(step, x):
        return checkpointed_loop(step, x, condition=lambda x: x[0] != 0.7390851)[0]

    begin = jnp.array([0.3], jnp.float32)
    steps, state = 0, begin
    while state[0] != 0.7390851:
        steps, state = steps + 1, jnp.cos(state)
    expected = jax.grad(total)(begin, plain(steps))
    assert equal(jax.grad(total)(begin, checkpointed), expected)
    with pytest.raises(UnsupportedError, match="inside jit"):
        jax.jit(lambda x: checkpointed(jnp.cos, x))(begin)


def compiled_temporary_bytes(steps, schedule):
    def run(state):
        final, _ = checkpointed_loop(jnp.sin, state, steps, schedule=schedule)
        return jnp.sum(final)

    compiled = jax.jit(jax.grad(run)).lower(jnp.ones(1000)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("budget", [20_000, 100_000, 400_000])
def test_a_budget_is_kept_by_the_compiled_program(budget):
    def total(state, loop):
        return jnp.sum(loop(lambda h: jnp.tanh(jnp.sin(h)), state))

    def budgeted(step, state):
        return checkpointed_loop(step, state, 200, budget=budget)[0]

    begin = jnp.linspace(0, 1, 1000)
    program = jax.jit(jax.grad(lambda s: total(s, budgeted))).lower(begin).compile()
    temporary_bytes = program.memory_analysis().temp_size_in_bytes
    # Besides a state on its way: counters. Some slots more would not have fitted.
    state_bytes = begin.nbytes
    assert budget - 2 * state_bytes < temporary_bytes < budget + state_bytes
    assert equal(program(begin), jax.grad(lambda s: total(s, plain(200)))(begin))


def test_a_budget_for_inputs_outputs_and_whole_numbers():
    def step(state, index, row):
        new = jnp.tanh(state["h"] * row)
        return {"h": new, "n": jnp.int32(index)}, new.sum()

    def total(h, rows, **options):
        begin = {"h": h, "n": jnp.int32(0)}
        (state, outputs), _ = checkpointed_loop(
            step, begin, inputs=rows, with_index=True, with_outputs=True, **options
        )
        return jnp.sum(state["h"]) + jnp.sum(outputs**2)

    h, rows = jnp.ones(5), jnp.linspace(0.5, 1, 40)
    found, expected = (
        jax.grad(lambda h, r, o=options: total(h, r, **o), (0, 1))(h, rows)
        for options in ({"budget": "200B"}, {"schedule": StoreAll(40)})
    )
    assert equal(found, expected)


def test_memory_does_not_grow_with_the_steps():
    few = compiled_temporary_bytes(100, Revolve(100, slots=5))
    many = compiled_temporary_bytes(10_000, Revolve(10_000, slots=5))
    table_bytes = 10_000 * 4 * 6 * 16
    assert many < few + table_bytes
    assert few < 100 * 4000 / 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"captures": [1]}, "not for JAX"),
        ({"vjp": min}, "not for JAX"),
        ({"budget": 1}, "does not hold the tape of one step"),
    ],
)
def test_what_is_not_for_jax_is_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        checkpointed_loop(jnp.sin, jnp.ones(2), 5, **arguments)


def test_states_must_keep_their_structure_and_type():
    with pytest.raises(UsageError, match="built otherwise"):
        checkpointed_loop(lambda x: (x, x), jnp.ones(2), 5)
    with pytest.raises(UsageError, match="turned an array of shape"):
        checkpointed_loop(lambda x: x + 0.5, jnp.ones(2, jnp.int32), 5)


def test_no_steps_return_the_beginning():
    final, checkpoints = checkpointed_loop(jnp.sin, jnp.ones(2), 0)
    assert final.tolist() == [1.0, 1.0]
    assert checkpoints == {}


def test_a_number_as_state_and_a_captured_array():
    def checkpointed(w):
        return checkpointed_loop(lambda h: h * w, 1.0, 10)[0]

    def plainly(w):
        return jax.lax.fori_loop(0, 10, lambda _, h: h * w, 1.0)

    assert jax.grad(checkpointed)(0.9) == jax.grad(plainly)(0.9)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_checkpoint_in_the_loss_is_an_error_unless_it_is_a_constant(wrap):
    def loss(x, constant):
        final, checkpoints = checkpointed_loop(lambda h: jnp.sin(h), x, 20)
        kept = checkpoints[next(iter(checkpoints))]
        return final + (jax.lax.stop_gradient(kept) if constant else kept)

    with pytest.raises(UnsupportedError, match="with_outputs"):
        wrap(jax.grad(lambda x: loss(x, constant=False)))(1.0)
    found = wrap(jax.grad(lambda x: loss(x, constant=True)))(1.0)
    expected = jax.grad(lambda x: checkpointed_loop(jnp.sin, x, 20)[0])(1.0)
    assert np.isclose(found, expected)


def test_the_seeds_counter_is_caught():
    count = 0

    def step(state):
        nonlocal count
        count += 1
        return state * count

    with pytest.raises(MismatchError, match="traces a step once"):
        checkpointed_loop(step, jnp.ones(2), 10)

"""JAX: the sweeps give the gradients of the plain scan, inside jit, vmap and grad."""

import pytest

jax = pytest.importorskip("jax", reason="an optional package")
jnp = pytest.importorskip("jax.numpy")
np = pytest.importorskip("numpy")

from recoup import checkpointed_loop  # noqa: E402
from recoup.schedules import Chunked, Even, Revolve, StoreAll  # noqa: E402
from tests.support.jax_loops import (  # noqa: E402
    arrays,
    checkpointed,
    equal,
    gradients,
    model,
    plain,
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


def test_a_wrong_length_is_detected():
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


def test_a_loop_works_under_vmap():
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


def compiled_temporary_bytes(steps, schedule):
    def run(state):
        final, _ = checkpointed_loop(jnp.sin, state, steps, schedule=schedule)
        return jnp.sum(final)

    compiled = jax.jit(jax.grad(run)).lower(jnp.ones(1000)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_the_steps():
    few = compiled_temporary_bytes(100, Revolve(100, slots=5))
    many = compiled_temporary_bytes(10_000, Revolve(10_000, slots=5))
    table_bytes = 10_000 * 4 * 6 * 16
    assert many < few + table_bytes
    assert few < 100 * 4000 / 4


def test_a_scalar_state_and_a_captured_array():
    def checkpointed(w):
        return checkpointed_loop(lambda h: h * w, 1.0, 10)[0]

    def plainly(w):
        return jax.lax.fori_loop(0, 10, lambda _, h: h * w, 1.0)

    assert jax.grad(checkpointed)(0.9) == jax.grad(plainly)(0.9)

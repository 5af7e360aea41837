"""JAX: a budget in bytes is kept by the compiled program."""

import pytest

jax = pytest.importorskip("jax", reason="an optional package")
jnp = pytest.importorskip("jax.numpy")

from recoup import checkpointed_loop  # noqa: E402
from recoup.schedules import StoreAll  # noqa: E402
from tests.support.jax_loops import equal, plain  # noqa: E402


@pytest.mark.parametrize("budget", [20_000, 100_000, 400_000])
def test_a_budget_is_kept_by_the_compiled_program(budget):
    def total(state, loop):
        return jnp.sum(loop(lambda h: jnp.tanh(jnp.sin(h)), state))

    def budgeted(step, state):
        return checkpointed_loop(step, state, 200, budget=budget)[0]

    begin = jnp.linspace(0, 1, 1000)
    program = jax.jit(jax.grad(lambda s: total(s, budgeted))).lower(begin).compile()
    temporary_bytes = program.memory_analysis().temp_size_in_bytes
    # Besides a state in transit: counters. More slots would not have fitted.
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

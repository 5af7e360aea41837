"""A recurrence on JAX arrays, plain and checkpointed, and its gradients."""

import pytest

jax = pytest.importorskip("jax", reason="an optional package")
jnp = pytest.importorskip("jax.numpy")
np = pytest.importorskip("numpy")

from recoup import checkpointed_loop  # noqa: E402


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

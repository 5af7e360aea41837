"""JAX: the arguments, results and errors of a loop."""

import pytest

jax = pytest.importorskip("jax", reason="an optional package")
jnp = pytest.importorskip("jax.numpy")
np = pytest.importorskip("numpy")

from recoup import checkpointed_loop  # noqa: E402
from recoup.errors import MismatchError, UnsupportedError, UsageError  # noqa: E402
from recoup.loops import grad  # noqa: E402
from tests.support.jax_loops import equal, plain  # noqa: E402

SMALL = {"min_loop_size": 2, "num_checkpoints": 4}


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"captures": [1]}, "no captures= and vjp= with JAX"),
        ({"vjp": min}, "no captures= and vjp= with JAX"),
        ({"budget": 1}, "does not hold the tape of one step"),
    ],
)
def test_options_that_jax_does_not_support_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        checkpointed_loop(jnp.sin, jnp.ones(2), 5, **arguments)


def test_states_must_keep_their_structure_and_type():
    with pytest.raises(UsageError, match="pytree structure"):
        checkpointed_loop(lambda x: (x, x), jnp.ones(2), 5)
    with pytest.raises(UsageError, match="turned an array of shape"):
        checkpointed_loop(lambda x: x + 0.5, jnp.ones(2, jnp.int32), 5)


def test_zero_steps_return_the_initial_state():
    final, checkpoints = checkpointed_loop(jnp.sin, jnp.ones(2), 0)
    assert final.tolist() == [1.0, 1.0]
    assert checkpoints == {}


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


def test_the_counter_of_the_original_guide_is_detected():
    count = 0

    def step(state):
        nonlocal count
        count += 1
        return state * count

    with pytest.raises(MismatchError, match="traces a step once"):
        checkpointed_loop(step, jnp.ones(2), 10)


def indexed(x):
    for index in range(40):
        x = jnp.sin(x) + index * 1e-3
    return x.sum()


def picked(x):
    table = [0.1 * number for number in range(40)]
    for index in range(40):
        x = jnp.sin(x) + table[index]
    return x.sum()


def branching(x):
    for index in range(40):
        x = jnp.sin(x) if index % 2 else jnp.cos(x)
    return x.sum()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_loop_with_an_index_is_differentiated_in_64_bits(dtype):
    with jax.enable_x64(True):
        x = jnp.linspace(0.1, 0.9, 3, dtype=dtype)
        found = grad(indexed, checkpoint=SMALL)(x)
        assert found.dtype == dtype
        assert np.allclose(found, jax.grad(indexed)(x), rtol=1e-5)
        step = lambda s, i: jnp.sin(s) + i * 1e-3  # noqa: E731
        total = lambda x: checkpointed_loop(step, x, 40, with_index=True)[0].sum()  # noqa: E731
        assert np.allclose(jax.grad(total)(x), jax.grad(indexed)(x), rtol=1e-5)


@pytest.mark.parametrize("function", [picked, branching])
def test_an_index_used_as_a_number_runs_plain_with_a_reason(function):
    x = jnp.linspace(0.1, 0.9, 3)
    with pytest.warns(UserWarning, match="runs plain: .* index as a Python number"):
        found = grad(function, checkpoint=SMALL)(x)
    assert equal(found, jax.grad(function)(x))


def test_a_step_that_uses_its_index_as_a_number_is_refused():
    with pytest.raises(UsageError, match="index as a Python number"):
        checkpointed_loop(
            lambda x, i: x + [0.1, 0.2][i % 2], jnp.ones(2), 10, with_index=True
        )

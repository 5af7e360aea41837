"""Source rewriting: every kind of loop gives the gradient of the plain function."""

import numpy as np
import pytest
import torch

from recoup import grad_with_checkpointing
from recoup.errors import UnsupportedError, UsageError
from recoup.loops import grad
from recoup.loops import loop as loop_module
from recoup.loops.rewriting import runtime

try:
    import jax.numpy as jnp
except ImportError:  # an optional package
    jnp = None

SCALE = 1.01


def one_variable(x, w):
    for _ in range(40):
        x = torch.sin(x * w)
    return x


def two_variables_and_a_branch_on_the_index(x, w):
    a, b = x, x * 0
    for i in range(2, 100, 3):
        if i % 2:
            a = torch.sin(a * w) + b
        else:
            b = b * 0.9 + a / i
    return a + b


def a_break(x, w):
    count = 0
    for _ in range(100):
        x = torch.sin(x * w) * 0.97
        count += 1
        if x < 0.3:
            break
    return x * count


def a_break_at_once(x, w):
    for i in range(100):
        if i == 0:
            break
        x = x * w
    return x * w


def a_continue(x, w):
    for i in range(60):
        x = torch.sin(x * w)
        if i % 3 == 0:
            continue
        x = x * 1.1
    return x


def an_early_return(x, w):
    for i in range(100):
        x = torch.sin(x * w) * 0.97
        if x < 0.3:
            return x * i
    return x


def a_return_that_never_comes(x, w):
    for i in range(50):
        x = torch.sin(x * w)
        if i > 1000:
            return x * 0
    return x * 2


def a_while_loop(x, w):
    while x > 0.2:
        x = torch.sin(x * w) * 0.97
    return x


def a_while_loop_that_never_runs(x, w):
    while x > 100:
        x = x * 2
    return x * w


def a_while_loop_with_break_and_continue(x, w):
    count = 0
    while True:
        x = torch.sin(x * w)
        count = count + 1
        if count % 4 == 0:
            continue
        x = x * 0.98
        if count > 50:
            break
    return x


def nested_loops(x, w):
    for i in range(6):
        for j in range(i + 3):
            x = torch.sin(x * w + j)
        x = x / (1 + i)
    return x


def nested_loops_with_breaks(x, w):
    for i in range(8):
        for j in range(10):
            x = torch.sin(x * w + 0.1)
            if j > i:
                break
        if i == 6:
            return x * 3
    return x


def an_appended_list(x, w):
    states = []
    for i in range(30):
        x = torch.sin(x * w)
        states.append(x * i)
    return torch.stack(states).square().sum() + len(states)


def a_total_that_begins_as_a_number(x, w):
    total = 0.0
    for i in range(30):
        x = torch.sin(x * w)
        total = total + x * i
    return total


def a_variable_made_in_the_loop(x, w):
    for _ in range(30):
        y = torch.sin(x * w)
        x = y * 1.01
    return x * y  # pyright: ignore[reportPossiblyUnboundVariable]


def a_variable_set_late(x, w):
    late = None
    for i in range(30):
        if i == 7:
            late = x * w
        x = torch.sin(x * w)
    return x if late is None else x * late


def the_target_after_the_loop(x, w):
    for i in range(30):  # noqa: B007 (used after the loop)
        x = torch.sin(x * w)
    return x * i  # pyright: ignore[reportPossiblyUnboundVariable]


def a_variable_changed_after_the_loop(x, w):
    factor = w * 2
    for _ in range(30):
        x = torch.sin(x * factor)
    factor = factor * 3
    return x * factor


def an_element_written(x, w):
    state = torch.stack([x, x])
    for i in range(30):
        value = torch.sin(state.sum() * w)
        state = state.clone()
        state[i % 2] = value
    return state.sum()


def a_global_and_an_inner_function(x, w):
    def bend(value):
        return torch.sin(value * w * SCALE)

    for _ in range(30):
        x = bend(x)
    return x


FUNCTIONS = [
    one_variable,
    two_variables_and_a_branch_on_the_index,
    a_break,
    a_break_at_once,
    a_continue,
    an_early_return,
    a_return_that_never_comes,
    a_while_loop,
    a_while_loop_that_never_runs,
    a_while_loop_with_break_and_continue,
    nested_loops,
    nested_loops_with_breaks,
    an_appended_list,
    a_total_that_begins_as_a_number,
    a_variable_made_in_the_loop,
    the_target_after_the_loop,
    a_variable_changed_after_the_loop,
    an_element_written,
    a_global_and_an_inner_function,
]


def over_a_tensor(x, w):
    for row in w:
        x = torch.sin(x * row)
    return x


def over_a_list(x, w):
    for row in [w[0], w[1] * 2, w[2]] * 10:
        x = torch.sin(x * row)
    return x


def over_a_zip(x, w):
    total = 0.0
    for left, right in zip(w, w.flip(0), strict=True):
        total = total + torch.sin(x * left) * right
    return total


def over_an_enumeration(x, w):
    for i, row in enumerate(w):
        x = torch.sin(x * row) + 0.01 * i
    return x


def over_a_generator(x, w):
    for row in (value * 2 for value in w):
        x = torch.sin(x * row)
    return x


def over_a_tensor_with_a_break(x, w):
    for i, row in enumerate(w):
        x = torch.sin(x * row)
        if i == 7:
            break
    return x


ITERATING = [
    over_a_tensor,
    over_a_list,
    over_a_zip,
    over_an_enumeration,
    over_a_generator,
    over_a_tensor_with_a_break,
]
USED_TWICE = [
    nested_loops,
    nested_loops_with_breaks,
    a_variable_changed_after_the_loop,
    a_break,
    an_early_return,
    over_a_list,
]
"""Their second argument is used in a loop and outside of it, or in one more than once:
its gradient is added up in another order. The worst of 30 random arguments to each was
8.6e-16 of a number; the first argument's was the same to the bit."""

SHORT = {"min_loop_size": 2, "num_checkpoints": 4, "on_unsupported": "raise"}


def values(function):
    x = torch.tensor(0.7, dtype=torch.float64)
    if function in ITERATING:
        return x, torch.linspace(0.5, 1.5, 30, dtype=torch.float64)
    return x, torch.tensor(1.02, dtype=torch.float64)


@pytest.fixture
def counted(monkeypatch):
    """Return the number of checkpointed loops that ran."""
    calls = []

    def run(*args, **kwargs):
        calls.append(args)
        return loop_module.checkpointed_loop(*args, **kwargs)

    monkeypatch.setattr(runtime, "checkpointed_loop", run)
    return calls


@pytest.mark.parametrize("function", FUNCTIONS + ITERATING, ids=lambda f: f.__name__)
def test_a_rewritten_loop_gives_the_plain_gradient(function, counted):
    arguments = values(function)
    expected = grad(function, (0, 1))(*arguments)
    assert not counted
    found = grad(function, (0, 1), checkpoint=SHORT)(*arguments)
    assert counted
    assert torch.equal(found[0], expected[0])
    if function in USED_TWICE:
        assert torch.allclose(found[1], expected[1], rtol=2**-50, atol=0)
    else:
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize(
    "options", [{"strategy": "revolve"}, {"memory_budget": "1KiB"}]
)
def test_all_strategies_give_the_same_gradients(options):
    arguments = values(one_variable)
    expected = grad(one_variable, (0, 1))(*arguments)
    found = grad(one_variable, (0, 1), checkpoint={"min_loop_size": 2, **options})(
        *arguments
    )
    assert all(map(torch.equal, found, expected))


def test_short_loops_run_plain_by_default(counted):
    grad(one_variable, checkpoint=True)(*values(one_variable))
    grad(one_variable, checkpoint={"strategy": "none"})(*values(one_variable))
    grad(one_variable, checkpoint={"enabled": False})(*values(one_variable))
    grad(one_variable, checkpoint=False)(*values(one_variable))
    assert not counted


def guide(x, w, b):
    state = x
    for _ in range(1000):  # as in the seed's guide
        state = torch.tanh(state @ w + b)
    return state


def test_the_function_of_the_guide_holds_31_states():
    generator = torch.Generator().manual_seed(0)
    x, b = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    w = torch.randn(8, 8, generator=generator, dtype=torch.float64) * 0.3
    expected = grad(guide, (0, 1, 2))(x, w, b)
    derivative = grad_with_checkpointing(guide, num_checkpoints=31, wrt=(0, 1, 2))
    assert all(map(torch.equal, derivative(x, w, b), expected))
    source = getattr(derivative, "source", "")
    assert "_recoup.run_for" in source
    assert "torch.tanh(state @ w + b)" in source


def test_the_requested_number_of_states_is_held(monkeypatch):
    kept = []

    def run(*args, **kwargs):
        result = loop_module.checkpointed_loop(*args, **kwargs)
        kept.append(len(result[1]))
        return result

    monkeypatch.setattr(runtime, "checkpointed_loop", run)
    x, b = torch.zeros(2, 3)
    derivative = grad_with_checkpointing(guide, num_checkpoints=20)
    derivative(x, torch.eye(3), b)
    grad(guide, checkpoint=True)(x, torch.eye(3), b)
    assert kept == [20, 31]


LINE = None


def an_else(x, w):
    for _ in range(9):
        x = x * w
    else:
        x = x + 1
    return x


def an_attribute(x, w):
    w.note = 0
    for i in range(9):
        w.note = i
        x = x * w
    return x


def a_conditional_append(x, w):
    kept = []
    for i in range(9):
        x = x * w
        if i % 2:
            kept.append(x)
    return sum(kept)


def an_append_that_is_read(x, w):
    kept = [x]
    for _ in range(9):
        kept.append(kept[-1] * w)
    return kept[-1]


def a_global_written(x, w):
    global LINE
    for i in range(9):
        LINE = i
        x = x * w
    return x


def no_loop(x, w):
    return x * w


@pytest.mark.parametrize(
    ("function", "offset", "reason"),
    [
        (an_else, 1, "it has an `else`"),
        (an_attribute, 2, "writes to an attribute"),
        (a_conditional_append, 2, "it appends to 'kept' conditionally"),
        (an_append_that_is_read, 2, "it appends to 'kept'"),
        (a_global_written, 2, "it writes to 'LINE'"),
    ],
)
def test_loops_that_cannot_be_rewritten_are_named_with_their_line(
    function, offset, reason
):
    line = function.__code__.co_firstlineno + offset
    expected = grad(function)(*values(one_variable))
    with pytest.warns(UserWarning, match=reason) as warned:
        derivative = grad(function, checkpoint={"min_loop_size": 2})
    assert f"line {line} of {function.__name__!r}" in str(warned[0].message)
    assert torch.equal(derivative(*values(one_variable)), expected)
    with pytest.raises(UnsupportedError, match=reason):
        grad(function, checkpoint={"on_unsupported": "raise"})


def test_a_variable_that_becomes_a_tensor_late_is_named_with_its_line():
    line = a_variable_set_late.__code__.co_firstlineno + 2
    arguments = values(one_variable)
    expected = grad(a_variable_set_late)(*arguments)
    derivative = grad(a_variable_set_late, checkpoint={"min_loop_size": 2})
    with pytest.warns(UserWarning, match=f"line {line} of 'a_variable_set_late'"):
        found = derivative(*arguments)
    assert torch.equal(found, expected)
    with pytest.raises(UsageError, match="turned a tensor of the state"):
        grad(a_variable_set_late, checkpoint=SHORT)(*arguments)


def test_a_function_without_loops_and_one_without_source():
    with pytest.warns(UserWarning, match="has no loop"):
        grad(no_loop, checkpoint=True)
    with pytest.raises(UnsupportedError, match="expected a plain function"):
        grad(torch.sin, checkpoint=True)
    with pytest.raises(UnsupportedError, match="made with `def`"):
        grad(lambda x: x, checkpoint=True)
    space = {}
    exec("def unread(x):\n    return x", space)
    with pytest.raises(UnsupportedError, match="cannot be read"):
        grad(space["unread"], checkpoint=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpoint": {"slots": 3}}, "an option of checkpoint= among .* got 'slots'"),
        ({"checkpoint": {"strategy": "best"}}, "strategy to be one of"),
        ({"checkpoint": {"on_unsupported": "ignore"}}, "on_unsupported"),
        ({"checkpoint": "yes"}, "True, False, a number or a mapping"),
        ({"checkpoint": {"memory_budget": 9, "num_checkpoints": 3}}, "leave one out"),
        ({"wrt": ()}, "at least one argument"),
    ],
)
def test_unknown_options_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        grad(one_variable, **arguments)


def test_a_missing_argument_is_refused():
    with pytest.raises(UsageError, match="names positional argument 2"):
        grad(one_variable, wrt=2)(*values(one_variable))


def test_closures_and_defaults_are_preserved():
    factor = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)

    def inner(x, w, power=2, *, shift=0.5):
        for _ in range(30):
            x = torch.sin(x * w * factor) ** power + shift
        return x

    arguments = values(one_variable)
    derivative = grad(inner, checkpoint=SHORT)
    assert torch.equal(derivative(*arguments), grad(inner)(*arguments))
    factor = torch.tensor(0.5, dtype=torch.float64)
    assert torch.equal(derivative(*arguments), grad(inner)(*arguments))
    other = derivative(*arguments, 3, shift=0.1)
    assert torch.equal(other, grad(inner)(*arguments, 3, shift=0.1))


def test_an_error_in_a_loop_names_the_line_of_the_source():
    def failing(x):
        for i in range(30):
            x = x / (i - 20) if i != 20 else x.no_such_method()
        return x

    line = failing.__code__.co_firstlineno + 2
    with pytest.raises(AttributeError) as caught:
        grad(failing, checkpoint=SHORT)(torch.tensor(1.0))
    lines = {entry.lineno + 1 for entry in caught.traceback}
    assert line in lines


def test_numpy_functions_work_unchanged():
    pytest.importorskip("autograd", reason="an optional package")
    generator = np.random.default_rng(0)
    x, b = generator.normal(size=(2, 6)) * [[1.0], [0.01]]
    # A rotation that grows a little: the gradient of 151 steps does not vanish.
    w = np.linalg.qr(generator.normal(size=(6, 6)))[0] * 1.1
    derivative = grad_with_checkpointing(
        numpy_guide, num_checkpoints=9, wrt=(0, 1, 2), on_unsupported="raise"
    )
    found = derivative(x, w, b)
    expected = grad(numpy_guide, (0, 1, 2))(x, w, b)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)
    more, less = (numpy_guide(x + step, w, b).sum() for step in (1e-6, -1e-6))
    # A difference of numbers near 1 has 1e-16 / 1e-6 of rounding.
    assert found[0].sum() == pytest.approx((more - less) / 2e-6, rel=1e-8, abs=0)


def numpy_guide(x, w, b):
    state = x
    for i in range(200):
        if i > 150:
            break
        state = np.tanh(np.dot(state, w) + b)
    return state


def test_jax_functions_work_unchanged():
    pytest.importorskip("jax", reason="an optional package")
    assert jnp is not None
    found = grad_with_checkpointing(jax_guide, num_checkpoints=9)(jnp.float32(0.3))
    assert found == grad(jax_guide)(jnp.float32(0.3))


def jax_guide(x):
    assert jnp is not None
    for _ in range(120):
        x = jnp.sin(x * 1.01)
    return x


def jax_breaking(x):
    for step in range(200):
        x = x * 0.99
        if step == 150:
            break
    return x


def test_a_jax_loop_with_a_break_warns_that_it_runs_plain():
    jax = pytest.importorskip("jax", reason="an optional package")
    assert jnp is not None
    x = jnp.float32(0.3)
    with pytest.warns(UserWarning, match="'jax_breaking'.*over JAX arrays"):
        found = grad_with_checkpointing(jax_breaking, num_checkpoints=9)(x)
    assert found == jax.grad(jax_breaking)(x)
    refusing = grad(jax_breaking, checkpoint={"on_unsupported": "raise"})
    with pytest.raises(UnsupportedError, match="over JAX arrays"):
        refusing(x)

"""Source rewriting: in-place writes of a loop are visible as in Python."""

import warnings

import numpy as np
import pytest
import torch

from recoup.errors import CaptureError, UnsupportedError
from recoup.loops import grad

SHORT = {"min_loop_size": 2, "num_checkpoints": 4}
X, W = (torch.tensor(value, dtype=torch.float64) for value in (0.7, 1.02))

# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


def an_element_of_a_tensor_in_a_list(x, w):
    history = zeros(40)
    rows = [history]
    for i in range(40):
        x = torch.sin(x * w)
        history[i] = x
    return rows[0].square().sum()


def an_element_through_a_view(x, w):
    base = zeros(2, 40)
    row = base[1]
    for i in range(40):
        x = torch.sin(x * w)
        row[i] = x
    return base.square().sum()


def an_element_seen_through_a_view(x, w):
    history = zeros(2, 40)
    row = history[0]
    for i in range(40):
        x = torch.sin(x * w)
        history[0, i] = x
    return row.square().sum()


def a_tensor_out_of_a_dictionary(x, w):
    table = {"h": zeros(40)}
    h = table["h"]
    for i in range(40):
        x = torch.sin(x * w)
        h[i] = x
    return table["h"].square().sum()


def an_operator_and_another_name(x, w):
    a = x.clone()
    other = a
    for _ in range(40):
        a.mul_(w).add_(0.01)
    return other * 2


def an_augmented_assignment_and_another_name(x, w):
    total = x * 0
    other = total
    for _ in range(40):
        x = torch.sin(x * w)
        total += x
    return other * 2


def a_total_that_begins_as_a_number(x, w):
    total = 0.0
    for _ in range(40):
        x = torch.sin(x * w)
        total += x
    return total


def an_entry_and_another_name(x, w):
    state = {"x": x, "count": 0}
    same = state
    for _ in range(40):
        state["x"] = torch.sin(state["x"] * w)
        state["count"] += 1
    return same["x"] * same["count"]


def an_entry_of_a_list_in_a_dictionary(x, w):
    state = {"all": [x, x * 2]}
    inner = state["all"]
    for i in range(40):
        state["all"][i % 2] = torch.sin(state["all"][i % 2] * w)
    return inner[0] + inner[1]


def a_tensor_in_a_container_written_to(x, w):
    state = [zeros(40), x]
    history = state[0]
    for i in range(40):
        state[1] = torch.sin(state[1] * w)
        state[0][i] = state[1]
    return history.square().sum()


def a_write_before_a_break(x, w):
    history = zeros(100)
    other = history
    for i in range(100):
        if i == 60:
            break
        x = torch.sin(x * w)
        history[i] = x
    return other.square().sum()


def a_write_in_a_while_loop(x, w):
    history, i = zeros(100), 0
    other = history
    while x > 0.3:
        x = torch.sin(x * w) * 0.97
        history[i] = x
        i = i + 1
    return other.square().sum()


def a_write_in_an_inner_loop(x, w):
    history = zeros(4, 10)
    other = history
    for i in range(4):
        for j in range(10):
            x = torch.sin(x * w)
            history[i, j] = x
    return other.square().sum()


def a_write_over_a_tensor(x, w):
    history = zeros(40)
    other = history.view(4, 10)
    for i, row in enumerate(torch.linspace(0.5, 1.5, 40, dtype=torch.float64)):
        x = torch.sin(x * w * row)
        history[i] = x
    return other.square().sum()


def a_write_before_and_after(x, w):
    history = zeros(42)
    rows = [history]
    history[0] = x * w
    for i in range(40):
        x = torch.sin(x + history[i])
        history[i + 1] = x * w
    history[41] = history[40] * 2
    return rows[0].square().sum()


def a_variable_that_never_changes_written_to_afterwards(x, w):
    best = x * 0
    kept = [best]
    for i in range(40):
        x = torch.sin(x * w)
        if i > 1000:
            best = x
    best.add_(x)
    return kept[0] * 3


def two_names_for_one_result_written_to_afterwards(x, w):
    for _ in range(40):
        y = torch.sin(x * w)
        x = y
    x.mul_(3)
    return y * 2


def the_last_element_of_a_list_written_to_afterwards(x, w):
    kept = []
    for _ in range(40):
        x = torch.sin(x * w)
        kept.append(x)
    x.mul_(3)
    return kept[-1] + kept[3]


def a_value_kept_from_the_first_iteration(x, w):
    best = x * 0
    for i in range(40):
        x = torch.sin(x * w)
        if i == 0:
            best = x
    return best + x * 2


CHECKPOINTED = [
    a_value_kept_from_the_first_iteration,
    an_element_of_a_tensor_in_a_list,
    an_element_through_a_view,
    an_element_seen_through_a_view,
    a_tensor_out_of_a_dictionary,
    an_operator_and_another_name,
    an_augmented_assignment_and_another_name,
    a_total_that_begins_as_a_number,
    an_entry_and_another_name,
    an_entry_of_a_list_in_a_dictionary,
    a_tensor_in_a_container_written_to,
    a_write_before_a_break,
    a_write_in_a_while_loop,
    a_write_in_an_inner_loop,
    a_write_over_a_tensor,
    a_write_before_and_after,
    a_variable_that_never_changes_written_to_afterwards,
    two_names_for_one_result_written_to_afterwards,
    the_last_element_of_a_list_written_to_afterwards,
]


@pytest.mark.parametrize("options", [{}, {"strategy": "revolve"}])
@pytest.mark.parametrize("function", CHECKPOINTED, ids=lambda f: f.__name__)
def test_a_write_is_visible_through_every_reference(function, options):
    expected = grad(function, (0, 1))(X, W)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        derivative = grad(
            function, (0, 1), checkpoint={**SHORT, **options, "on_unsupported": "raise"}
        )
        found = derivative(X, W)
    assert torch.equal(found[0], expected[0])
    # Uses outside the loop, or twice in a step, are summed in another order.
    assert torch.allclose(found[1], expected[1], rtol=2**-48, atol=0)


def a_list_that_the_loop_goes_over(x, w):
    values = [x * k for k in range(40)]
    for i, value in enumerate(values):
        x = torch.sin(x + value)
        if i + 1 < 40:
            values[i + 1] = x * w
    return x


def a_write_that_autograd_does_not_see(x, w):
    p = x.clone()
    q = p
    for _ in range(40):
        x = torch.sin(x * w)
        p.data[...] = x.detach()
    return q * x


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (a_list_that_the_loop_goes_over, "it iterates over 'values' and writes to it"),
        (a_write_that_autograd_does_not_see, "writes to the `data` of a tensor"),
    ],
)
def test_an_unsupported_write_in_the_source_keeps_the_loop_plain(function, reason):
    expected = grad(function, (0, 1))(X, W)
    with pytest.warns(UserWarning, match=reason):
        derivative = grad(function, (0, 1), checkpoint=SHORT)
    assert all(map(torch.equal, derivative(X, W), expected))


def a_list_gone_over_by_another_name(x, w):
    values = [x * k for k in range(40)]
    same = values
    for i, value in enumerate(same):
        x = torch.sin(x + value)
        values[(i + 1) % 40] = x * w
    return x + values[0]


def test_a_list_iterated_by_another_name_is_an_error():
    with pytest.raises(UnsupportedError, match="iterates over it by another name"):
        grad(a_list_gone_over_by_another_name, checkpoint=SHORT)(X, W)


def elements_written_to_by_another_name(x, w):
    rows = [x * k for k in range(40)]
    total = x * 0
    for row in rows:
        same = row
        same.mul_(w)
        total = total + torch.sin(row)
    return total + rows[3]


def test_elements_written_by_another_name_are_an_error():
    with pytest.raises(
        CaptureError, match="writes to the elements that it iterates over"
    ):
        grad(elements_written_to_by_another_name, checkpoint=SHORT)(X, W)


def a_write_to_an_argument(x, w):
    for _ in range(40):
        x += w
    return x


def test_writes_that_pytorch_refuses_stay_refused():
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        grad(a_write_to_an_argument)(X, W)
    derivative = grad(a_write_to_an_argument, checkpoint=SHORT)
    with (
        pytest.warns(UserWarning, match="which PyTorch does not allow"),
        pytest.raises(RuntimeError, match="a leaf Variable that requires grad"),
    ):
        derivative(X, W)


def an_entry_of_arrays(x):
    state = {"x": x}
    same = state
    for _ in range(40):
        state["x"] = np.sin(state["x"] * 1.1)
    return same["x"]


def an_array_written_to(x):
    counts = np.zeros(3)
    same = counts
    for i in range(40):
        counts[i % 3] += 1
        x = np.sin(x * 1.1 + counts[0])
    return x * same[1]


def test_numpy_writes_are_visible():
    pytest.importorskip("autograd", reason="an optional package")
    x = np.array([0.3, 0.7])
    found = grad(an_entry_of_arrays, checkpoint={**SHORT, "on_unsupported": "raise"})
    assert np.array_equal(found(x), grad(an_entry_of_arrays)(x))
    plain = grad(an_array_written_to, checkpoint=SHORT)
    with pytest.warns(UserWarning, match="'counts' in place, which is no tensor"):
        assert np.array_equal(plain(x), grad(an_array_written_to)(x))


def test_jax_writes_are_visible():
    pytest.importorskip("jax", reason="an optional package")
    import jax.numpy as jnp

    def an_entry(x):
        state = {"x": x}
        same = state
        for _ in range(40):
            state["x"] = jnp.sin(state["x"] * 1.1)
        return same["x"]

    x = jnp.float32(0.3)
    found = grad(an_entry, checkpoint={**SHORT, "on_unsupported": "raise"})(x)
    assert found == grad(an_entry)(x)

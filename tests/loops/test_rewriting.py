"""Source rewriting: hidden changes of a loop are found."""

import functools
import types
import warnings

import pytest
import torch
from torch import nn

from recoup.errors import CaptureError, UnsupportedError
from recoup.loops import grad

PLAIN = {"min_loop_size": 2, "num_checkpoints": 4}


def a_function_made_before_that_reads(x):
    y = x
    twice = lambda: y * 2  # noqa: E731 (late binding is the point)
    for _ in range(40):
        y = torch.sin(x)
    return twice()


def a_function_made_before_that_the_loop_calls(x):
    y, z = x, x * 0

    def twice():
        return y * 2

    for _ in range(40):
        y = torch.sin(y)
        z = z + twice()
    return z


def a_function_that_writes_around(x):
    total = x * 0

    def add(value):
        nonlocal total
        total = total + value

    for _ in range(40):
        x = torch.sin(x)
        add(x)
    return total


def a_lazy_generator(x):
    for value in (x * k / 40 for k in range(40)):
        x = torch.sin(x + value)
    return x


def a_list_in_a_dictionary(x):
    kept = {"all": []}
    for _ in range(40):
        x = torch.sin(x)
        kept["all"].append(x)
    return sum(kept["all"])


def a_list_that_is_extended(x):
    kept = []
    for _ in range(40):
        x = torch.sin(x)
        kept.extend([x, x * 2])
    return sum(kept)


def a_stack_that_is_popped(x):
    waiting = [x * k for k in range(40)]
    for _ in range(40):
        x = torch.sin(x + waiting.pop())
    return x


def an_attribute_set_by_a_function(x):
    holder = types.SimpleNamespace(h=x)
    for _ in range(40):
        setattr(holder, "h", torch.sin(holder.h))  # noqa: B010 (the point)
        x = x + 1
    return holder.h + x


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (a_function_made_before_that_reads, "reads 'y'"),
        (a_function_made_before_that_the_loop_calls, "reads 'y'"),
        (a_function_that_writes_around, "it uses 'add', which writes to a variable"),
        (a_lazy_generator, "reads 'x'"),
        (a_list_in_a_dictionary, "changes the object that .* names"),
        (a_list_that_is_extended, "changes the object that 'kept' names"),
        (a_stack_that_is_popped, "changes the object that 'waiting' names"),
        (an_attribute_set_by_a_function, "writes to an attribute"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_hidden_change_of_a_loop_is_found(function, reason):
    x = torch.tensor(0.7, dtype=torch.float64)
    expected = grad(function)(x)
    with pytest.warns(UserWarning, match=reason):
        derivative = grad(function, checkpoint=PLAIN)
    assert torch.equal(derivative(x), expected)
    with pytest.raises(UnsupportedError, match=reason):
        grad(function, checkpoint={**PLAIN, "on_unsupported": "raise"})


def a_list_that_grows(x):
    kept = []
    for _ in range(40):
        x = torch.sin(x)
        kept += [x]
    return sum(kept)


def a_dictionary_that_grows(x):
    kept = {}
    for i in range(40):
        x = torch.sin(x)
        kept[i] = x
    return sum(kept.values())


@pytest.mark.parametrize(
    "function",
    [
        a_list_that_grows,
        a_dictionary_that_grows,
    ],
)
def test_a_state_that_cannot_be_carried_is_found_when_the_loop_runs(function):
    x = torch.tensor(0.7, dtype=torch.float64)
    expected = grad(function)(x)
    derivative = grad(function, checkpoint=PLAIN)
    line = function.__code__.co_firstlineno
    with pytest.warns(UserWarning, match=f"of {function.__name__!r} runs plain") as w:
        assert torch.equal(derivative(x), expected)
    assert any(f"line {line + k} " in str(w[0].message) for k in (1, 2))


def a_write_by_an_operator(x):
    h, s = x.clone(), x * 0
    for _ in range(40):
        h.mul_(0.99).add_(torch.sin(x) * 0.01)
        s = s + h
    return h + s


def a_list_of_each_iteration(x):
    for _ in range(40):
        parts = []
        parts.append(torch.sin(x))  # pyright: ignore[reportArgumentType]
        parts.append(torch.cos(x))  # pyright: ignore[reportArgumentType]
        x = sum(parts) / 2
    return x


def a_function_made_before_that_reads_what_stays(x):
    w = x * 0.9
    step = lambda h: torch.sin(h * w)  # noqa: E731 (a lambda is the point)
    for _ in range(40):
        x = step(x)
    return x


@pytest.mark.parametrize(
    "function",
    [
        a_write_by_an_operator,
        a_list_of_each_iteration,
        a_function_made_before_that_reads_what_stays,
    ],
)
def test_harmless_loops_are_checkpointed(function):
    x = torch.tensor(0.7, dtype=torch.float64)
    expected = grad(function)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = grad(function, checkpoint={**PLAIN, "on_unsupported": "raise"})(x)
    assert torch.equal(found, expected)


def a_bound_method(x):
    kept = []
    append = kept.append
    for _ in range(40):
        x = torch.sin(x)
        append(x)
    return sum(kept)


def a_write_by_another_name(x):
    h, s = torch.zeros(4, dtype=torch.float64), x * 0
    for i in range(40):
        part = h[i % 4 : i % 4 + 1]
        part.copy_(torch.sin(x + s).reshape(1))
        s = s * 0.5 + x
    return h.sum() + s


@pytest.mark.parametrize("function", [a_bound_method, a_write_by_another_name])
def test_faults_found_at_run_time_are_errors_with_their_line(function):
    with pytest.raises(CaptureError, match="would be lost") as raised:
        grad(function, checkpoint=PLAIN)(torch.tensor(0.7, dtype=torch.float64))
    line = function.__code__.co_firstlineno
    (note,) = raised.value.__notes__
    places = tuple(f"in the loop at line {line + k} of " for k in (2, 3))
    assert note.startswith(places)


def a_function_that_calls_itself(x, depth=2):
    for _ in range(40):
        x = torch.sin(x)
    return x if depth == 0 else a_function_that_calls_itself(x, depth - 1)


LAYERS = nn.ModuleList(nn.Linear(1, 1).double() for _ in range(40))


def layers_one_after_the_other(x):
    h = x.reshape(1, 1)
    for layer in LAYERS:
        h = torch.tanh(layer(h))
    return h * layer(h)  # pyright: ignore[reportPossiblyUnboundVariable]


@pytest.mark.parametrize(
    "function", [a_function_that_calls_itself, layers_one_after_the_other]
)
def test_functions_and_layers_by_name(function):
    x = torch.tensor(0.7, dtype=torch.float64)
    expected = grad(function)(x)
    derivative = grad(function, checkpoint={**PLAIN, "on_unsupported": "raise"})
    assert torch.equal(derivative(x), expected)


def numbers_in_a_list(x):
    kept = []
    for i in range(40):
        x = torch.sin(x)
        kept.append((x, i))
    return sum(part * i for part, i in kept)


def test_a_list_with_other_objects_than_tensors_runs_plain_with_a_warning():
    x = torch.tensor(0.7, dtype=torch.float64)
    expected = grad(numbers_in_a_list)(x)
    derivative = grad(numbers_in_a_list, checkpoint=PLAIN)
    with pytest.warns(UserWarning, match="runs plain"):
        assert torch.equal(derivative(x), expected)


def tripled(function):
    @functools.wraps(function)
    def inner(x):
        return 3 * function(x)

    return inner


@tripled
def a_decorated_function(x):
    for _ in range(40):
        x = torch.sin(x)
    return x


def test_a_decorated_function_is_refused():
    with pytest.raises(UnsupportedError, match="wrapped by a decorator"):
        grad(a_decorated_function, checkpoint=PLAIN)

"""Source rewriting: functions and generators of a loop see the values of Python."""

import functools
import warnings

import pytest
import torch

from recoup.errors import UnsupportedError
from recoup.loops import grad

SHORT = {"min_loop_size": 2, "num_checkpoints": 4}
X, W = (torch.tensor(value, dtype=torch.float64) for value in (0.7, 1.02))

# Late binding is the point of everything here.
# ruff: noqa: B023, C417, E731
# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false


def a_function_that_leaves_the_loop(x, w):
    for _ in range(40):
        x = torch.sin(x * w)
        last = lambda: x * 2
    return last()


def a_function_called_when_its_variable_is_another(x, w):
    for _ in range(40):
        x = torch.sin(x * w)
        double = lambda: x * 2
    x = x + w
    return double()


def a_function_that_sees_what_is_set_after_the_loop(x, w):
    factor = w
    for _ in range(40):
        x = torch.sin(x * w)
        scale = lambda value: value * factor
    factor = factor * 3
    return scale(x)


def a_definition_that_leaves_the_loop(x, w):
    for _ in range(40):
        x = torch.sin(x * w)

        def double():
            return x * 2

    x = x + w
    return double()


def a_generator_that_leaves_the_loop(x, w):
    for _ in range(40):
        x = torch.sin(x * w)
        parts = (x * k for k in range(3))
    x = x + w
    return sum(parts)


def a_lazy_map_that_leaves_the_loop(x, w):
    for _ in range(40):
        x = torch.sin(x * w)
        parts = map(lambda k: x * k, range(3))
    x = x + w
    return sum(parts)


def functions_kept_in_a_list(x, w):
    kept = []
    for _ in range(40):
        x = torch.sin(x * w)
        kept.append(lambda: x * 2)
    return kept[3]() + kept[30]()


def a_function_kept_under_another_name(x, w):
    for _ in range(40):
        x = torch.sin(x * w)
        first = lambda: x * 2
        second = first
    x = x + w
    return second()


def a_function_kept_in_a_tuple(x, w):
    for _ in range(40):
        x = torch.sin(x * w)
        pair = (lambda: x * 2, 1)
    x = x + w
    return pair[0]()


def a_function_of_the_iteration_before_around_an_inner_loop(x, w):
    twice = lambda: w * 2
    for _ in range(4):
        for _ in range(10):
            x = torch.sin(x * w)
        x = x + twice()
        twice = lambda: x * 2
    return x


def a_function_that_sees_what_stays(x, w):
    kept = torch.sin
    for _ in range(40):
        kept = lambda value: value * w
        x = torch.sin(kept(x))
    return kept(x)


@pytest.mark.parametrize(
    "function",
    [
        a_function_that_sees_what_stays,
        a_function_that_leaves_the_loop,
        a_function_called_when_its_variable_is_another,
        a_function_that_sees_what_is_set_after_the_loop,
        a_definition_that_leaves_the_loop,
        a_generator_that_leaves_the_loop,
        a_lazy_map_that_leaves_the_loop,
        functions_kept_in_a_list,
        a_function_kept_under_another_name,
        a_function_kept_in_a_tuple,
        a_function_of_the_iteration_before_around_an_inner_loop,
    ],
)
def test_functions_that_may_outlive_their_iteration_keep_the_loop_plain(function):
    expected = grad(function, (0, 1))(X, W)
    with pytest.warns(UserWarning, match="is not checkpointed.*after its iteration"):
        derivative = grad(function, (0, 1), checkpoint=SHORT)
    assert all(map(torch.equal, derivative(X, W), expected))
    with pytest.raises(UnsupportedError, match="after its iteration"):
        grad(function, checkpoint={**SHORT, "on_unsupported": "raise"})


def a_function_called_in_its_iteration(x, w):
    for _ in range(40):
        scaled = lambda: x * w
        x = torch.sin(x)
        x = scaled()
    return x


def a_definition_called_in_its_iteration(x, w):
    for _ in range(40):

        def scaled():
            return y * w

        y = torch.sin(x)
        x = scaled()
    return x


def a_generator_used_up_in_its_iteration(x, w):
    for _ in range(40):
        parts = (x * k for k in range(3))
        x = torch.sin(x * w)
        x = sum(parts)
        x = x + sum(w * k for k in range(2)) / (1 + max(x.item() * k for k in range(2)))
    return x


def functions_given_to_functions(x, w):
    for i in range(40):
        y = functools.reduce(lambda one, other: one + other * x, [w, w])
        z = torch.func.vmap(lambda row: row * x)(torch.stack([y, w]))
        best = max((0, 1, 2), key=lambda k: (k * i) % 3)
        x = torch.sin(z.sum() * best)
    return x


def comprehensions(x, w):
    for _ in range(40):
        parts = [x * k for k in range(3) if k]
        table = {k: part * w for k, part in enumerate(parts)}
        x = torch.sin(sum(table.values()))
    return x


@pytest.mark.parametrize(
    "function",
    [
        a_function_called_in_its_iteration,
        a_definition_called_in_its_iteration,
        a_generator_used_up_in_its_iteration,
        functions_given_to_functions,
        comprehensions,
    ],
)
def test_functions_used_only_in_their_iteration_are_checkpointed(function):
    expected = grad(function, (0, 1))(X, W)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        derivative = grad(
            function, (0, 1), checkpoint={**SHORT, "on_unsupported": "raise"}
        )
        found = derivative(X, W)
    # Values that a step uses twice are summed in another order: rounding.
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=2**-45, atol=0)

"""Source rewriting: loops that end by an exception, a jump or not at all."""

import contextlib
import warnings

import pytest
import torch

from recoup.errors import UnsupportedError
from recoup.loops import grad

SHORT = {"min_loop_size": 2, "num_checkpoints": 4}
X, W = (torch.tensor(value, dtype=torch.float64) for value in (0.7, 1.02))


def an_iterator_that_ends_the_loop(x, w):
    feed = iter([0.1] * 30)
    try:
        while True:
            x = torch.sin(x * w) + next(feed)
    except StopIteration:
        pass
    return x


def an_exception_that_is_handled(x, w):
    try:
        for i in range(40):
            x = torch.sin(x * w)
            if i == 30:
                raise KeyError
    except KeyError:
        x = x * 2
    return x


def an_exception_that_a_loop_around_handles(x, w):
    for _ in range(4):
        try:
            for i in range(10):
                x = torch.sin(x * w)
                if i == 7:
                    raise KeyError
        except KeyError:
            x = x * 2
    return x


def a_loop_in_a_handler_with_a_finally(x, w):
    kept = []
    try:
        with contextlib.suppress(ValueError):
            raise KeyError
    except KeyError:
        for _ in range(10):
            x = torch.sin(x * w)
    finally:
        kept.append(x)
    return kept[0] * x


def a_context_that_ends_exceptions(x, w):
    with contextlib.suppress(KeyError):
        for i in range(40):
            x = torch.sin(x * w)
            if i == 30:
                raise KeyError
    return x


def a_continue_before_a_finally(x, w):
    for i in range(40):
        try:
            if i % 2:
                continue
            x = torch.sin(x)
        finally:
            x = x * w
    return x


def a_break_before_a_finally(x, w):
    for i in range(40):
        try:
            x = torch.sin(x)
            if i == 20:
                break
        finally:
            x = x * w
    return x


def an_iterator_from_before(x, w):
    feed = iter([0.1] * 90)
    for _ in range(40):
        x = torch.sin(x * w) + next(feed)
    return x


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (an_iterator_that_ends_the_loop, "has a `try` around it"),
        (an_exception_that_is_handled, "has a `try` around it"),
        (an_exception_that_a_loop_around_handles, "has a `try` around it"),
        (a_loop_in_a_handler_with_a_finally, "has a `try` around it"),
        (
            a_context_that_ends_exceptions,
            "a `with` that may suppress exceptions around",
        ),
        (a_continue_before_a_finally, "a `finally` follows it"),
        (a_break_before_a_finally, "a `finally` follows it"),
        (an_iterator_from_before, "advances an iterator"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_code_that_sees_an_unfinished_loop_keeps_it_plain(function, reason):
    expected = grad(function, (0, 1))(X, W)
    with pytest.warns(UserWarning, match=f"is not checkpointed.*{reason}"):
        derivative = grad(function, (0, 1), checkpoint=SHORT)
    assert all(map(torch.equal, derivative(X, W), expected))
    with pytest.raises(UnsupportedError, match=reason):
        grad(function, checkpoint={**SHORT, "on_unsupported": "raise"})


def a_try_in_the_body(x, w):
    table = {k: 0.1 * k for k in range(0, 40, 3)}
    for i in range(40):
        try:
            y = w * table[i]
        except KeyError as error:
            y = w / (1 + error.args[0])
        x = torch.sin(x + y)
    return x


def a_value_of_the_iteration_before_after_an_exception(x, w):
    table = {k: 0.1 * k for k in range(0, 40, 3)}
    for i in range(40):
        with contextlib.suppress(KeyError):
            y = w * table[i]
        x = torch.sin(x + y)  # pyright: ignore[reportPossiblyUnboundVariable]
    return x


def a_finally_in_the_body(x, w):
    for _ in range(40):
        try:
            x = torch.sin(x)
        finally:
            x = x * w
    return x


def a_context_that_passes_exceptions_on(x, w):
    with torch.enable_grad(), warnings.catch_warnings():
        for _ in range(40):
            x = torch.sin(x * w)
    return x


def a_loop_after_a_try(x, w):
    try:
        shift = {}["shift"]
    except KeyError:
        shift = 0.5
    for _ in range(40):
        x = torch.sin(x * w + shift)
    return x


def an_iterator_of_the_iteration(x, w):
    for _ in range(40):
        parts = iter([w, x])
        x = torch.sin(next(parts) * next(parts)) + next(iter([0.1]))
    return x


def an_assignment_in_the_condition(x, w):
    i = 0
    while (i := i + 1) < 40:
        x = torch.sin(x * w)
    return x * i


def an_assignment_in_the_condition_of_a_loop_that_continues(x, w):
    while (y := x * w) > 0.3:
        x = torch.sin(y) * 0.9
        if y > 0.5:
            continue
        x = x * 0.99
    return x * y


def a_match_in_the_body(x, w):
    for i in range(40):
        match i % 3:
            case 0:
                y = x * w
            case rest:
                y = x / rest
        x = torch.sin(y)
    return x


@pytest.mark.parametrize(
    "function",
    [
        a_try_in_the_body,
        a_value_of_the_iteration_before_after_an_exception,
        a_finally_in_the_body,
        a_context_that_passes_exceptions_on,
        a_loop_after_a_try,
        an_iterator_of_the_iteration,
        an_assignment_in_the_condition,
        an_assignment_in_the_condition_of_a_loop_that_continues,
        a_match_in_the_body,
    ],
)
def test_exits_within_an_iteration_are_checkpointed(function):
    expected = grad(function, (0, 1))(X, W)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        derivative = grad(
            function, (0, 1), checkpoint={**SHORT, "on_unsupported": "raise"}
        )
        found = derivative(X, W)
    assert torch.equal(found[0], expected[0])
    # Uses outside the loop, or twice in a step, are summed in another order.
    assert torch.allclose(found[1], expected[1], rtol=2**-50, atol=0)


def a_variable_of_no_iteration(x, steps):
    for _ in range(steps):
        y = torch.sin(x)
    return y  # pyright: ignore[reportPossiblyUnboundVariable]


def a_variable_of_a_loop_that_never_runs(x, steps):
    while steps > 100:
        y = torch.sin(x)
    return y  # pyright: ignore[reportPossiblyUnboundVariable]


def a_variable_read_before_it_is_set(x, steps):
    for i in range(steps + 9):
        x = torch.sin(x)
        if i == 5 and y:  # noqa: F821 # pyright: ignore[reportPossiblyUnboundVariable]
            x = x * 2
        if i == 7:
            y = True  # noqa: F841 (read before it is set)
    return x


@pytest.mark.parametrize("minimum", [0, 2])
@pytest.mark.parametrize(
    "function",
    [
        a_variable_of_no_iteration,
        a_variable_of_a_loop_that_never_runs,
        a_variable_read_before_it_is_set,
    ],
)
def test_an_unbound_variable_raises_the_error_of_python(function, minimum):
    derivative = grad(function, checkpoint={"min_loop_size": minimum})
    with pytest.raises(NameError, match="'y'"):
        grad(function)(X, 0)
    with pytest.raises(NameError, match="'y'"):
        derivative(X, 0)

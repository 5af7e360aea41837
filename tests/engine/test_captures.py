"""Captures: variables that a function sees, and that must not move on."""

import functools

import pytest
import torch
from torch import nn

from recoup.engine.replay.call_state import Captures
from recoup.errors import CaptureError

SCALE = 2.0


def uses_a_global(x):
    return x * SCALE


class Holder:
    def method(self, x):
        return x * SCALE


class TestUnchanged:
    @pytest.mark.parametrize(
        "function",
        [
            uses_a_global,
            Holder().method,
            functools.partial(uses_a_global),
            nn.Linear(2, 2),
            torch.exp,
            len,
        ],
        ids=["function", "method", "partial", "module", "operator", "builtin"],
    )
    def test_whatever_can_be_called_can_be_looked_at(self, function):
        Captures(function).check("function")

    def test_a_variable_that_gets_an_equal_number_has_not_moved(self):
        i = 1000

        def function(x):
            return x * i

        seen = Captures(function)
        i = int("1000")
        seen.check("function")

    def test_a_tensor_that_stays_itself_has_not_moved(self):
        weight = torch.ones(3)
        seen = Captures(lambda x: x * weight)
        weight.view(3)
        seen.check("function")

    def test_variables_that_the_function_does_not_use_may_move(self):
        i = 1
        seen = Captures(lambda x: x)
        i += 1
        seen.check("function")


class TestMoved:
    @pytest.mark.parametrize(
        ("before", "after", "shown"),
        [
            (1, 2, "it was 1, it is 2"),
            (1, 1.0, r"it was 1, it is 1\.0"),
            (True, 1, "it was True, it is 1"),
            ("a", "b", "it was 'a', it is 'b'"),
            (None, 3, "it was None, it is 3"),
            ([1], [1], "it was list, it is list"),
        ],
    )
    def test_a_closure_variable_that_moved_is_named(self, before, after, shown):
        variable = before

        def function(x):
            return x, variable

        seen = Captures(function)
        variable = after
        with pytest.raises(CaptureError, match=f"'double'.*'variable'.*{shown}"):
            seen.check("double")

    def test_an_equal_tensor_is_another_tensor(self):
        weight = torch.ones(3)

        def function(x):
            return x * weight

        seen = Captures(function)
        weight = torch.ones(3)
        with pytest.raises(CaptureError, match=r"'weight'.*it was Tensor"):
            seen.check("function")

    def test_a_tensor_that_was_written_to_is_named(self):
        weight = torch.ones(3)
        seen = Captures(lambda x: x * weight)
        weight.add_(1)
        with pytest.raises(CaptureError, match=r"'weight'.*changed in place"):
            seen.check("function")

    @pytest.mark.parametrize(
        "wrap",
        [lambda f: f, functools.partial, lambda f: functools.partial(f, 1)],
        ids=["itself", "partial", "with arguments"],
    )
    def test_a_global_that_moved_is_named(self, monkeypatch, wrap):
        seen = Captures(wrap(uses_a_global))
        monkeypatch.setitem(globals(), "SCALE", 3.0)
        with pytest.raises(CaptureError, match=r"'SCALE'.*it was 2\.0, it is 3\.0"):
            seen.check("function")

    def test_a_global_of_a_method_that_moved_is_named(self, monkeypatch):
        seen = Captures(Holder().method)
        monkeypatch.setitem(globals(), "SCALE", 3.0)
        with pytest.raises(CaptureError, match="'SCALE'"):
            seen.check("function")

    def test_a_global_that_is_gone_is_named(self, monkeypatch):
        seen = Captures(uses_a_global)
        monkeypatch.delitem(globals(), "SCALE")
        with pytest.raises(CaptureError, match="it is nothing"):
            seen.check("function")

    def test_a_variable_that_was_not_there_yet_is_named(self):
        def make():
            def function(x):
                return x * later

            seen = Captures(function)
            later = 3
            return seen, later

        seen, _ = make()
        with pytest.raises(CaptureError, match=r"'later'.*it was nothing, it is 3"):
            seen.check("function")

    def test_the_message_shows_the_way_out(self):
        i = 1

        def function(x):
            return x * i

        seen = Captures(function)
        i = 2
        with pytest.raises(CaptureError, match="lambda x, i=i"):
            seen.check("function")


class TestInnerCode:
    """Code inside of a function names variables as the function itself does."""

    def test_a_global_that_a_generator_expression_alone_names(self, monkeypatch):
        def function(xs):
            return sum(x * SCALE for x in xs)

        seen = Captures(function)
        seen.check("function")
        monkeypatch.setitem(globals(), "SCALE", 3.0)
        with pytest.raises(CaptureError, match="'SCALE'"):
            seen.check("function")

    def test_a_variable_that_has_a_value_only_later(self):
        def function(x):
            return x * late

        seen = Captures(function)
        late = 2.0
        with pytest.raises(CaptureError, match="'late'"):
            seen.check("function")

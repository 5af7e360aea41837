"""What torch.compile leaves on functions and modules, and skipping frames."""

# Torch types what a module holds as Tensor | Module, and a gradient as maybe None.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportFunctionMemberAccess=false

import functools

import pytest
import torch
from torch import nn

from recoup.backend.compiler.recognition import (
    call_slot,
    is_compiled,
    leave_uncompiled,
    original_of,
)
from tests.support.steps import Block, Mlp
from tests.support.twin import IdleMode
from tests.support.watching import CountingBackend


def function(x):
    return x.sin().cos()


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Forget what other tests compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class TestRecognising:
    def test_compiled_functions_are_recognised(self):
        compiled = torch.compile(function, backend="eager")
        assert is_compiled(compiled)
        assert is_compiled(functools.partial(compiled, torch.ones(1)))
        assert not is_compiled(function)
        assert not is_compiled(functools.partial(function))
        assert not is_compiled(len)

    def test_a_decorated_function_is_recognised(self):
        @torch.compile(backend="eager")
        def decorated(x):
            return x.sin()

        assert is_compiled(decorated)

    def test_compiled_modules_are_recognised(self):
        model = Mlp()
        assert not is_compiled(model)
        assert not is_compiled(model.forward)
        assert is_compiled(torch.compile(model, backend="eager"))
        assert not is_compiled(model)

    def test_a_module_compiled_in_place_is_recognised(self):
        model = Mlp()
        model.compile(backend="eager")
        assert is_compiled(model)
        assert is_compiled(model.forward)
        assert is_compiled(functools.partial(function, model))

    def test_a_module_with_a_compiled_part_is_recognised(self):
        model = nn.Sequential(Block(), Block())
        model[1].mlp.compile(backend="eager")
        assert is_compiled(model)
        assert not is_compiled(model[0])


class TestOriginals:
    def test_the_original_is_found(self):
        compiled = torch.compile(function, backend="eager")
        assert original_of(compiled) is function
        assert original_of(functools.partial(compiled)) is function
        assert original_of(function) is function

    def test_the_original_module_is_found(self):
        model = Mlp()
        assert original_of(torch.compile(model, backend="eager")) is model
        assert original_of(model) is model

    def test_the_original_module_is_found_behind_what_calls_it(self):
        model, other = Mlp(), Mlp()
        assert original_of(torch.compile(model, backend="eager").forward) is model
        other.compile(backend="eager")
        assert original_of(other._compiled_call_impl) is other
        assert original_of(model.__call__) is model
        assert original_of(model.forward) == model.forward

    def test_the_original_is_found_through_several_wrappings(self):
        twice = torch.compile(torch.compile(function, backend="eager"), backend="eager")
        assert original_of(twice) is function
        partial = functools.partial(function)
        assert original_of(torch.compile(partial, backend="eager")) is function

    def test_the_original_of_a_compiled_method_is_bound(self):
        class Holder:
            @torch.compile(backend="eager")
            def method(self, x):
                return x

        holder = Holder()
        found = original_of(holder.method)
        assert found.__self__ is holder
        assert found.__qualname__.endswith("Holder.method")
        assert found.__code__.co_filename == __file__

    def test_a_call_goes_through_the_slot(self):
        model = Mlp()
        assert call_slot(model) == "forward"
        model.compile(backend="eager")
        assert call_slot(model) == "_compiled_call_impl"
        calls = []
        model._compiled_call_impl = lambda x: calls.append(x)
        model("input")
        assert calls == ["input"]


class TestSkipping:
    def graphs(self, call):
        """How many graphs are compiled when compiled code calls a function."""
        backend = CountingBackend()

        def outer(x):
            return call(x.exp()).tanh()

        compiled = torch.compile(outer, backend=backend)
        x = torch.ones(3)
        assert torch.equal(compiled(x), call(x.exp()).tanh())
        return backend.compiled

    def test_a_function_left_uncompiled_is_not_traced(self):
        def plain(x):
            return x.sin()

        def skipped(x):
            return x.sin()

        leave_uncompiled(skipped)
        assert self.graphs(plain) == 1
        assert self.graphs(skipped) == 2

    def test_what_it_calls_is_not_traced_either(self):
        def inner(x):
            return x.sin().cos()

        def skipped(x):
            return inner(x)

        leave_uncompiled(skipped)
        assert self.graphs(skipped) == 2

    def test_it_wraps_nothing(self):
        def skipped(x):
            return x

        code = skipped.__code__
        leave_uncompiled(skipped)
        assert skipped.__code__ is code
        assert skipped(3) == 3

    def test_under_a_dispatch_mode_a_compiled_function_runs_uncompiled(self):
        # Why compiled functions are run again instead of being recorded. (Torch 2.13
        # never compiles that function any more then, 2.15 does at the next call.)
        backend = CountingBackend()
        compiled = torch.compile(lambda x: x.sin().cos(), backend=backend)
        x = torch.ones(3)
        with IdleMode():
            assert torch.equal(compiled(x), function(x))
            assert backend.counts == (0, 0)
        assert torch.equal(compiled(x), function(x))

"""Rerun: a function that cannot be recorded is called again, and watched."""

# Torch types what a module holds as Tensor | Module, and a gradient as maybe None.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportFunctionMemberAccess=false

import copy
import functools
import threading
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from recoup import (
    CheckpointManager,
    CheckpointProfiler,
    CheckpointScope,
    checkpoint,
    checkpoint_module,
    rerun,
)
from recoup.backend.memory.meters import StorageMeter
from recoup.checkpointing import is_recomputing
from recoup.errors import (
    CaptureError,
    ChangedTensorError,
    ClearedError,
    MismatchError,
    UnsupportedError,
)
from tests.support.steps import Mlp, gradient, problems, step_differences
from tests.support.twin import leftovers
from tests.support.variants import fixed_weights
from tests.support.watching import Memory, saved_bytes

PROBLEMS = problems()


def leaf(count: int = 10) -> Any:
    return torch.linspace(-1, 1, count, requires_grad=True)


def chain(x):
    return x.exp().sin().tanh()


class TestGradients:
    @pytest.mark.parametrize("name", PROBLEMS)
    def test_a_step_that_is_run_again_leaves_what_the_plain_step_leaves(self, name):
        model, x = PROBLEMS[name]
        assert step_differences(model, rerun, x) == []

    def test_what_is_saved_inside_is_forgotten(self):
        x = leaf(1000)
        assert saved_bytes(lambda: rerun(chain, x)) == x.nbytes

    def test_first_and_second_derivatives_are_right(self):
        def function(x, y):
            return rerun(lambda a, b: (a.sin() * b.exp(), a.tanh() + b), x, y)

        inputs = [
            torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
            for _ in range(2)
        ]
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)

    def test_gradients_flow_to_captured_tensors_with_a_graph(self):
        def forward(call):
            x, parameter = leaf(), nn.Parameter(torch.linspace(1, 2, 10))
            captured = parameter.exp()
            call(lambda t: (t * captured).sin() * parameter, x).sum().backward()
            return x.grad, parameter.grad

        plain = forward(lambda function, x: function(x))
        for found, expected in zip(forward(rerun), plain, strict=True):
            assert torch.equal(found, expected)

    def test_nested_arguments_arrive_both_times(self):
        def function(tree, *, scale):
            return (tree["a"][0] * scale).sin() * tree["b"]

        a, b = leaf(), leaf()
        rerun(function, {"a": [a, "text"], "b": b}, scale=2.0).sum().backward()
        twin_a, twin_b = leaf(), leaf()
        function({"a": [twin_a], "b": twin_b}, scale=2.0).sum().backward()
        assert torch.equal(a.grad, twin_a.grad)
        assert torch.equal(b.grad, twin_b.grad)

    def test_every_way_to_ask_for_gradients(self):
        x = leaf()
        expected = gradient(chain, x)
        (weights,) = fixed_weights([x])
        (found,) = torch.autograd.grad(rerun(chain, x), x, weights)
        assert torch.equal(found, expected)
        rerun(chain, x).backward(weights, inputs=[x])
        assert torch.equal(x.grad, expected)

    def test_dropout_draws_the_same_numbers_and_leaves_the_generator_alone(self):
        model, x = PROBLEMS["attention"]

        def call(model, x):
            out = rerun(model, x)
            torch.rand(3)  # moves the generator between forward and backward
            return out

        def plain(model, x):
            out = model(x)
            torch.rand(3)
            return out

        torch.manual_seed(0)
        ours = _gradients(call, copy.deepcopy(model), x)
        torch.manual_seed(0)
        for found, expected in zip(
            ours, _gradients(plain, copy.deepcopy(model), x), strict=True
        ):
            assert torch.equal(found, expected)

    def test_autocast_is_as_it_was(self):
        model, x = Mlp(), torch.randn(4, 16)
        twin = copy.deepcopy(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = rerun(model, x)
        assert out.dtype is torch.bfloat16
        out.sum().backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = twin(x)
        expected.sum().backward()
        assert torch.equal(model.widen.weight.grad, twin.widen.weight.grad)

    def test_buffers_move_once(self):
        model, x = nn.BatchNorm1d(4), torch.randn(8, 4)
        rerun(model, x).sum().backward()
        twin = nn.BatchNorm1d(4)
        twin(x).sum().backward()
        assert int(model.num_batches_tracked) == 1
        assert torch.equal(model.running_mean, twin.running_mean)

    def test_buffers_that_are_replaced_move_once_too(self):
        class Replacing(nn.Linear):
            def forward(self, input):  # noqa: A002 (torch's name)
                y = super().forward(input)
                self.mean = self.mean * 0.5 + y.detach().mean(0)
                return (y * self.mean).sin().exp()

        def trained(call):
            torch.manual_seed(0)
            model, x = Replacing(4, 4), torch.randn(8, 4)
            model.register_buffer("mean", torch.zeros(4))
            for _ in range(3):
                call(model, x).sum().backward()
            return model.mean, model.weight.grad

        for found, expected in zip(
            trained(rerun), trained(lambda model, x: model(x)), strict=True
        ):
            assert torch.equal(found, expected)

    @pytest.mark.parametrize(
        "hooks", [lambda: CheckpointScope("outer"), torch.autograd.graph.save_on_cpu]
    )
    def test_outer_hooks_get_a_view_of_several_whose_base_was_written_to(self, hooks):
        def trained(call, around):
            base, x = leaf(6).reshape(2, 3).detach().requires_grad_(), leaf(3)
            second = base.unbind()[1]
            base.detach()[0] += 1  # from here on its graph cannot be made again
            with around():
                y = call(lambda x, view: (x.sin() + view.detach()).exp(), x, second)
            y.sum().backward()
            return x.grad

        expected = trained(lambda function, *args: function(*args), nullcontext)
        assert torch.equal(trained(rerun, hooks), expected)


class TestCalls:
    def calls(self, function):
        """A function, and the list of how its calls saw `is_recomputing`."""
        seen = []

        def wrapped(x):
            seen.append(is_recomputing())
            return function(x)

        return wrapped, seen

    def test_it_is_called_once_more_for_each_backward(self):
        function, seen = self.calls(chain)
        y = rerun(function, leaf())
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        assert seen == [False, True, True]

    def test_several_outputs_need_one_more_call(self):
        function, seen = self.calls(lambda x: (x.exp().sin(), x.cos().tanh()))
        first, second = rerun(function, leaf())
        (first * second).sum().backward()
        assert seen == [False, True]

    def test_it_stops_once_everything_is_found(self):
        reached = []

        def function(x):
            y = x.exp().sin()
            reached.append(is_recomputing())
            return y

        rerun(function, leaf()).sum().backward()
        assert reached == [False]

    def test_without_gradients_it_is_a_plain_call(self):
        with torch.no_grad(), CheckpointProfiler() as profiler:
            assert not rerun(chain, leaf()).requires_grad
        assert profiler.checkpoint_count() == 0

    def test_two_threads_may_go_back_at_once(self):
        expected = gradient(chain, leaf(100))
        found, start = [], threading.Barrier(2)

        def work():
            start.wait()
            found.extend(
                gradient(lambda x: rerun(chain, x), leaf(100)) for _ in range(20)
            )

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 40
        assert all(torch.equal(one, expected) for one in found)

    def test_an_exception_leaves_nothing_behind(self):
        outside = leaf(1000) * 2
        memory = Memory(outside)

        def fail(x):
            x.exp()
            raise KeyError("on purpose")

        with pytest.raises(KeyError, match="on purpose"):
            rerun(fail, outside)
        assert list(leftovers()) == []
        del outside
        assert memory.is_freed

    def test_an_exception_in_the_second_call_reaches_the_user(self):
        def function(x):
            if is_recomputing():
                raise KeyError("second time")
            return x.exp().sin()

        y = rerun(function, leaf())
        with pytest.raises(KeyError, match="second time"):
            y.sum().backward()
        assert list(leftovers()) == []

    def test_torch_func_around_says_what_to_do(self):
        with pytest.raises(UnsupportedError, match=r"torch\.autograd\.grad"):
            torch.func.grad(lambda x: rerun(chain, x).sum())(torch.ones(3))
        assert list(leftovers()) == []


class TestMemory:
    @pytest.mark.parametrize("backward", [True, False])
    def test_a_finished_graph_frees_everything(self, backward):
        outside = leaf(1000) * 2
        y = rerun(chain, outside)
        memories = [Memory(outside), Memory(y)]
        del outside
        assert not memories[0].is_freed
        if backward:
            y.sum().backward()
        del y
        assert all(memory.is_freed for memory in memories)

    def test_what_backward_did_not_ask_for_is_dropped_with_it(self):
        x = leaf(1000)
        with StorageMeter() as meter:
            first, second = rerun(lambda t: (t.exp().sin(), t.cos().tanh()), x)
            before = meter.live_bytes
            first.sum().backward(retain_graph=True)
            x.grad = None
            assert meter.live_bytes == before
        second.sum().backward()

    def test_a_scope_around_it_drops_its_arguments(self):
        x = leaf(1000)
        with CheckpointScope("outer"):
            middle = x.exp()
            memory = Memory(middle)
            y = rerun(chain, middle)
            del middle
            z = y.cos()
        del y
        assert memory.is_freed
        z.sum().backward()
        twin = leaf(1000)
        chain(twin.exp()).cos().sum().backward()
        assert torch.equal(x.grad, twin.grad)

    @pytest.mark.parametrize("after", [lambda y: y, torch.tanh], ids=["last", "inside"])
    def test_a_scope_inside_it_gives_right_gradients(self, after):
        def function(x):
            with CheckpointScope("inner"):
                y = x.exp().sin().tanh()
            return after(y)

        found = gradient(lambda x: rerun(function, x), leaf())
        assert torch.equal(found, gradient(lambda x: after(chain(x)), leaf()))

    def test_it_nests(self):
        def function(x):
            return rerun(chain, x.exp()).cos()

        found = gradient(lambda x: rerun(function, x), leaf())
        expected = gradient(lambda x: chain(x.exp()).cos(), leaf())
        assert torch.equal(found, expected)

    def test_in_a_recorded_function_it_gives_right_gradients(self):
        found = gradient(
            lambda x: checkpoint(lambda t: rerun(chain, t.exp()).cos(), x), leaf()
        )
        expected = gradient(lambda x: chain(x.exp()).cos(), leaf())
        assert torch.equal(found, expected)

    def test_hooks_around_it_keep_its_arguments(self):
        x = leaf(1000)
        with torch.autograd.graph.save_on_cpu():
            y = rerun(chain, x)
        y.sum().backward()
        twin = leaf(1000)
        chain(twin).sum().backward()
        assert torch.equal(x.grad, twin.grad)

    def test_clearing_frees_the_arguments_and_backward_says_so(self):
        manager = CheckpointManager()
        outside = leaf(1000) * 2
        memory = Memory(outside)
        with manager:
            y = rerun(chain, outside)
        del outside
        manager.clear_all_checkpoints()
        assert memory.is_freed
        with pytest.raises(ClearedError, match="chain"):
            y.sum().backward()

    def test_the_call_dies_without_the_collector(self):
        class Callable:
            def __call__(self, x):
                return x.exp().sin()

        function = Callable()
        reference = weakref.ref(function)
        y = rerun(function, leaf())
        del function
        y.sum().backward()
        del y
        assert reference() is None


class TestChecks:
    def test_a_late_bound_loop_variable_is_named(self):
        factors = [2.0, 3.0, 5.0]
        y = leaf()
        for i in range(3):
            y = rerun(lambda t: (t * factors[i]).sin(), y)  # noqa: B023 (the trap)
        with pytest.raises(CaptureError, match=r"variable 'i'.*it was 1, it is 2"):
            y.sum().backward()

    # Dynamo itself looks at `.grad` of what a compiled function is given.
    @pytest.mark.filterwarnings("ignore:The .grad attribute")
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_a_late_bound_loop_variable_of_a_compiled_function_is_named(self, backend):
        torch._dynamo.reset()
        factors = [2.0, 3.0, 5.0]
        for _ in range(2):
            y = leaf()
            for i in range(3):
                function = torch.compile(
                    lambda t: (t * factors[i]).sin(),  # noqa: B023 (the trap)
                    backend=backend,
                )
                y = checkpoint(function, y)
            with pytest.raises(CaptureError, match="variable 'i'"):
                y.sum().backward()

    def test_binding_the_variable_is_the_way_out(self):
        factors = [2.0, 3.0, 5.0]

        def bound(x):
            for i in range(3):
                x = rerun(lambda t, i=i: (t * factors[i]).sin(), x)
            return x

        def plain(x):
            for factor in factors:
                x = (x * factor).sin()
            return x

        assert torch.equal(gradient(bound, leaf()), gradient(plain, leaf()))

    def test_an_argument_that_changed_is_named(self):
        x = leaf(12)
        outside = (x * 2).view(3, 4)
        y = rerun(lambda t: t.exp().sin(), outside)
        outside.add_(1)
        with pytest.raises(ChangedTensorError, match=r"\(3, 4\)"):
            y.sum().backward()

    def test_a_captured_tensor_that_changed_is_named(self):
        captured = torch.ones(10)
        y = rerun(lambda t: (t * captured).sin(), leaf())
        captured.add_(1)
        with pytest.raises(CaptureError, match=r"'captured'.*changed in place"):
            y.sum().backward()

    def test_other_values_are_found_at_first_use(self):
        noise = iter([1.0, 2.0])
        y = rerun(lambda t: (t * next(noise)).sin(), leaf())
        with pytest.raises(MismatchError, match="did not give what forward computed"):
            y.sum().backward()

    def test_other_shapes_are_found_always(self):
        def function(x):
            return (x[:4] if is_recomputing() else x).exp().sin()

        for _ in range(2):
            y = rerun(function, leaf())
            with pytest.raises(MismatchError, match=r"shape \(10,\).*\(4,\)"):
                y.sum().backward()

    def test_fewer_saved_tensors_are_found_always(self):
        def function(x):
            y = x.exp()
            return y if is_recomputing() else y.sin().cos()

        for _ in range(2):
            y = rerun(function, leaf())
            with pytest.raises(MismatchError, match=r"saved 3 tensors.*only 1"):
                y.sum().backward()

    def test_every_compiled_function_is_verified_on_its_own(self):
        steady = torch.compile(lambda t: t.exp().sin(), backend="eager")
        checkpoint(steady, leaf()).sum().backward()
        state = {"factor": 1.0}
        drifting = torch.compile(lambda t: (t * state["factor"]).sin(), backend="eager")
        y = checkpoint(drifting, leaf())
        state["factor"] = 2.0
        with pytest.raises(MismatchError, match="did not give what forward computed"):
            y.sum().backward()

    def test_every_compiled_module_is_verified_on_its_own(self, compiled):
        class Drifting(nn.Module):
            factor = 1.0

            def forward(self, x):
                return (x * self.factor).sin()

        for drifts in (False, True, True):
            module = Drifting()
            y = compiled(module)(leaf())
            module.factor = 2.0 if drifts else 1.0
            if drifts:
                with pytest.raises(MismatchError, match=r"'.*Drifting'"):
                    y.sum().backward()
            else:
                y.sum().backward()


def _wrapped(module):
    return checkpoint_module(torch.compile(module, backend="eager"))


def _in_place(module):
    module.compile(backend="eager")
    return checkpoint_module(module)


def _called(module):
    return functools.partial(checkpoint, torch.compile(module, backend="eager"))


@pytest.fixture(params=[_wrapped, _in_place, _called])
def compiled(request):
    """Each way to have a compiled module called again."""
    torch._dynamo.reset()
    yield request.param
    torch._dynamo.reset()


def normalized():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Tanh())


class TestCompiledModules:
    @pytest.mark.parametrize("width", [8, 16])
    def test_steps_leave_what_plain_steps_leave(self, compiled, width):
        model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.BatchNorm1d(width))
        twin, x = copy.deepcopy(model), torch.randn(4, 8)
        call = compiled(model)
        for _ in range(3):
            call(x).square().sum().backward()
            twin(x).square().sum().backward()
        for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad, plain.grad)
        for ours, plain in zip(model.buffers(), twin.buffers(), strict=True):
            assert torch.equal(ours, plain)


class Net:
    """No module itself."""

    def __init__(self, body):
        self.body = body

    def run(self, x):
        return self.body(x)


def _call_first(given, x):
    while not isinstance(given, nn.Module):
        held = vars(given) if isinstance(given, Net) else given
        given = next(iter(held.values() if isinstance(held, dict) else held))
    return given(x)


class TestModulesElsewhere:
    """Modules whose buffers a function moves, wherever it has them from."""

    PLACES = {  # noqa: RUF012 (constant)
        "list": lambda m: (lambda layers: lambda x: layers[0](x))([m]),
        "dictionary": lambda m: (lambda layers: lambda x: layers["a"](x))({"a": m}),
        "object": lambda m: Net(m).run,
        "object in a closure": lambda m: (lambda net: lambda x: net.body(x))(Net(m)),
        "default": lambda m: lambda x, layer=m: layer(x),
        "argument": lambda m: functools.partial(lambda layer, x: layer(x), m),
        "arguments in a list": lambda m: functools.partial(_call_first, [m]),
    }

    @pytest.mark.parametrize("place", PLACES)
    def test_their_buffers_move_once(self, place):
        torch._dynamo.reset()
        model, x = normalized(), torch.randn(32, 8)
        twin = copy.deepcopy(model)
        function = torch.compile(self.PLACES[place](model), backend="eager")
        for _ in range(3):
            checkpoint(function, x).square().sum().backward()
            twin(x).square().sum().backward()
        for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad, plain.grad)
        for ours, plain in zip(model.buffers(), twin.buffers(), strict=True):
            assert torch.equal(ours, plain)

    def test_a_module_that_is_given_has_its_buffers_move_once(self):
        model, x = normalized(), torch.randn(32, 8)
        for given in ([model], {"a": [model]}, Net(model)):
            model[1].reset_running_stats()

            rerun(_call_first, given, x).sum().backward()
            assert int(model[1].num_batches_tracked) == 1


class TestNames:
    @pytest.mark.parametrize(
        ("function", "name"),
        [
            (chain, "chain"),
            (nn.Tanh(), "Tanh"),
            (functools.partial(chain), "chain"),
            (torch.compile(chain, backend="eager"), "chain"),
            (torch.compile(nn.Tanh(), backend="eager"), "Tanh"),
            (torch.compile(nn.Tanh(), backend="eager").forward, "Tanh"),
            (torch.compile(functools.partial(chain), backend="eager"), "chain"),
        ],
        ids=[
            *("function", "module", "partial", "compiled", "compiled module"),
            *("what a compiled module calls", "compiled partial"),
        ],
    )
    def test_a_call_is_called_after_its_function(self, function, name):
        manager = CheckpointManager()
        with manager:
            y = rerun(function, leaf())
        assert [node.name for node in manager.nodes] == [name]
        del y


def _gradients(call, model, x):
    given = x.clone().requires_grad_()
    call(model, given).square().sum().backward()
    return [given.grad, *(parameter.grad for parameter in model.parameters())]

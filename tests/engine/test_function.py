"""Functions: a region around one call."""

# Torch types what a module holds as Tensor | Module, and a gradient as maybe None.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import copy
import functools
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from recoup import CheckpointProfiler, CheckpointScope, checkpoint
from recoup.checkpointing import checkpoint_segment, checkpoint_segment_flex
from recoup.errors import UnsupportedError, UsageError
from tests.support.steps import Mlp, gradient, problems, step_differences
from tests.support.twin import leftovers
from tests.support.watching import CountingBackend, Memory, Replayed, saved_bytes

PROBLEMS = problems()
Pair = namedtuple("Pair", ["left", "right"])


def leaf(count: int = 10) -> Any:
    return torch.linspace(-1, 1, count, requires_grad=True)


def counted(function):
    """A function of a tensor, and the list that its calls are written on."""
    calls = []

    def wrapped(x):
        calls.append(x.shape)
        return function(x)

    return wrapped, calls


class TestCalls:
    @pytest.mark.parametrize("name", PROBLEMS)
    def test_a_checkpointed_model_leaves_what_the_plain_one_leaves(self, name):
        model, x = PROBLEMS[name]
        assert step_differences(model, checkpoint, x) == []

    def test_what_is_saved_inside_is_forgotten(self):
        x = leaf(1000)
        assert saved_bytes(lambda: x.exp().sin().tanh()) == 2 * x.nbytes
        assert (
            saved_bytes(lambda: checkpoint(lambda t: t.exp().sin().tanh(), x))
            == x.nbytes
        )

    def test_the_function_runs_once_and_its_operators_twice(self):
        function, calls = counted(lambda x: x.exp().sin().tanh())
        y = checkpoint(function, leaf())
        with Replayed() as replayed:
            y.sum().backward()
        assert len(calls) == 1
        assert dict(replayed.operators) == {"exp": 1, "sin": 1, "tanh": 1}

    def test_arguments_and_results_are_any_nested_structures(self):
        def function(pair, *, options):
            left = pair.left * options["scale"][0]
            return {"both": Pair(left.exp(), left * pair.right), "none": None, "n": 3}

        def forward(call):
            x = [leaf(), leaf() * 2, leaf() * 3]
            x = [tensor.detach().requires_grad_() for tensor in x]
            out = call(function, Pair(x[0], x[1]), options={"scale": [x[2], "text"]})
            assert (out["none"], out["n"], type(out["both"])) == (None, 3, Pair)
            (out["both"].left.sin() + out["both"].right).sum().backward()
            return [tensor.grad for tensor in x]

        plain = forward(lambda function, *args, **kwargs: function(*args, **kwargs))
        for found, expected in zip(forward(checkpoint), plain, strict=True):
            assert torch.equal(found, expected)

    def test_gradients_flow_to_whatever_the_function_captures(self):
        def forward(call):
            x = leaf()
            parameter = nn.Parameter(torch.linspace(1, 2, 10))
            captured = parameter.exp()
            call(lambda t: (t * captured).sin() * parameter, x).sum().backward()
            return x.grad, parameter.grad

        plain = forward(lambda function, x: function(x))
        for found, expected in zip(forward(checkpoint), plain, strict=True):
            assert torch.equal(found, expected)

    def test_first_and_second_derivatives_are_right(self):
        def function(x, y):
            return checkpoint(lambda a, b: (a.sin() * b.exp(), a.tanh() + b), x, y)

        inputs = [
            torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
            for _ in range(2)
        ]
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)

    def test_a_loop_variable_that_moves_on_does_no_harm(self):
        factors = [2.0, 3.0, 5.0]

        def late(x):
            for i in range(3):
                x = checkpoint(lambda t: (t * factors[i]).sin(), x)  # noqa: B023
            return x

        def plain(x):
            for factor in factors:
                x = (x * factor).sin()
            return x

        assert torch.equal(gradient(late, leaf()), gradient(plain, leaf()))

    def test_side_effects_happen_once(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        twin = copy.deepcopy(model)
        x = torch.randn(8, 4)
        torch.manual_seed(0)
        checkpoint(model, x).sum().backward()
        after = torch.get_rng_state()
        torch.manual_seed(0)
        twin(x).sum().backward()
        assert int(model[1].num_batches_tracked) == 1
        for found, expected in zip(model.buffers(), twin.buffers(), strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(after, torch.get_rng_state())

    def test_several_outputs_need_one_replay(self):
        x = leaf()
        first, second = checkpoint(lambda t: (t.exp().sin(), t.exp().cos()), x)
        with Replayed() as replayed:
            (first * second).sum().backward()
        assert replayed.operators["exp"] == 2

    def test_an_output_that_the_loss_ignores_does_no_harm(self):
        def function(x):
            return checkpoint(lambda t: (t.exp().sin(), t.tanh().cos()), x)[0]

        expected = gradient(lambda x: x.exp().sin(), leaf())
        assert torch.equal(gradient(function, leaf()), expected)

    def test_without_gradients_it_is_a_plain_call(self):
        with torch.no_grad(), CheckpointProfiler() as profiler:
            y = checkpoint(torch.exp, leaf())
        assert not y.requires_grad
        assert profiler.checkpoint_count() == 0

    def test_an_exception_leaves_nothing_behind(self):
        outside = leaf(1000) * 2
        memory = Memory(outside)

        def fail(x):
            x.exp().sin()
            raise KeyError("on purpose")

        with pytest.raises(KeyError, match="on purpose"):
            checkpoint(fail, outside)
        assert list(leftovers()) == []
        del outside
        assert memory.is_freed

    @pytest.mark.parametrize(
        "function",
        [functools.partial(torch.mul, other=2.0), torch.exp, nn.Tanh(), Mlp().forward],
        ids=["partial", "builtin", "module", "method"],
    )
    def test_everything_callable_is_a_function(self, function):
        x = torch.randn(3, 16)
        found = gradient(lambda t: checkpoint(function, t), x)
        assert torch.equal(found, gradient(function, x))

    def test_what_is_no_function_is_refused(self):
        with pytest.raises(
            UsageError, match="expected a function or a tensor, got int"
        ):
            checkpoint(3)  # pyright: ignore[reportCallIssue]

    def test_torch_func_inside_says_what_to_do(self):
        with pytest.raises(UnsupportedError, match=r"torch\.autograd\.grad"):
            checkpoint(lambda x: torch.func.grad(lambda t: t.sin().sum())(x), leaf())
        assert list(leftovers()) == []

    def test_torch_func_around_says_what_to_do(self):
        with pytest.raises(UnsupportedError, match=r"torch\.autograd\.grad"):
            torch.func.grad(lambda x: checkpoint(torch.exp, x).sum())(torch.ones(3))
        assert list(leftovers()) == []


class TestTensors:
    def test_a_tensor_is_recomputed(self):
        x = leaf(1000)
        with CheckpointScope("block", use_recomputation=False):
            z = checkpoint(torch.relu(x * 2))
            memory = Memory(z)
            y = z.square()
        del z
        assert memory.is_freed
        y.sum().backward()
        twin = leaf(1000)
        torch.relu(twin * 2).square().sum().backward()
        assert torch.equal(x.grad, twin.grad)

    def test_a_tensor_takes_no_arguments(self):
        with pytest.raises(UsageError, match="expected the tensor alone"):
            checkpoint(leaf(), leaf())


class TestCompiled:
    def run(self, function, backend, x):
        """Counts after the forward and after the backward of a checkpointed call."""
        y = checkpoint(function, x)
        forward = backend.counts
        y.sum().backward()
        return forward, backend.counts

    def test_a_compiled_function_stays_compiled(self):
        backend = CountingBackend()
        function = torch.compile(lambda x: x.exp().sin().tanh(), backend=backend)
        x = leaf()
        assert self.run(function, backend, x) == ((1, 1), (1, 2))
        twin = leaf()
        twin.exp().sin().tanh().sum().backward()
        assert torch.equal(x.grad, twin.grad)
        assert self.run(function, backend, leaf()) == ((1, 3), (1, 4))

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    @pytest.mark.parametrize("name", ["mlp", "attention"])
    def test_a_compiled_model_gets_the_gradients_of_the_compiled_model(
        self, name, backend
    ):
        torch._dynamo.reset()
        model, x = PROBLEMS[name]
        model = copy.deepcopy(model)

        def gradients(call):
            torch.manual_seed(0)
            model.zero_grad()
            given = x.clone().requires_grad_()
            call(torch.compile(model, backend=backend), given).square().sum().backward()
            return [given.grad, *(parameter.grad for parameter in model.parameters())]

        plain = gradients(lambda function, x: function(x))
        for found, expected in zip(gradients(checkpoint), plain, strict=True):
            assert torch.equal(found, expected)

    def test_the_saved_tensors_of_a_compiled_function_are_forgotten(self):
        function = torch.compile(lambda x: x.exp().sin().tanh(), backend="eager")
        x = leaf(1000)
        assert saved_bytes(lambda: function(x)) == 2 * x.nbytes
        assert saved_bytes(lambda: checkpoint(function, x)) == x.nbytes

    def test_a_partial_of_a_compiled_function_stays_compiled(self):
        backend = CountingBackend()
        function = torch.compile(lambda x, y: (x * y).sin(), backend=backend)
        partial = functools.partial(function, y=2.0)
        assert self.run(partial, backend, leaf()) == ((1, 1), (1, 2))

    def test_a_method_of_a_compiled_module_stays_compiled(self):
        backend = CountingBackend()
        model = Mlp(10)
        model.compile(backend=backend)
        x = torch.randn(3, 10, requires_grad=True)
        assert self.run(model, backend, x) == ((1, 1), (1, 2))

    def test_a_segment_of_a_compiled_function_stays_compiled(self):
        backend = CountingBackend()
        function = torch.compile(lambda t: (t[0] * t[1]).sin(), backend=backend)
        a, b = leaf(), leaf()
        y = checkpoint_segment([a, b], function)
        y.sum().backward()
        assert backend.counts == (1, 2)
        assert torch.equal(a.grad, b.grad)

    @pytest.mark.slow
    # Importing inductor itself gives them.
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_an_inductor_function_gets_the_gradients_of_its_own_plain_run(self):
        function = torch.compile(lambda x: x.exp().sin().tanh())
        x, twin = leaf(), leaf()
        checkpoint(function, x).sum().backward()
        function(twin).sum().backward()
        assert torch.equal(x.grad, twin.grad)

    def test_a_compiled_function_in_a_plain_one_gives_right_gradients(self):
        compiled = torch.compile(lambda x: x.exp().sin(), backend="aot_eager")
        found = gradient(lambda x: checkpoint(lambda t: compiled(t).tanh(), x), leaf())
        expected = gradient(lambda x: x.exp().sin().tanh(), leaf())
        assert torch.equal(found, expected)

    # Dynamo itself looks at `.grad` of whatever crosses a break in the graph.
    @pytest.mark.filterwarnings("ignore:The .grad attribute")
    def test_a_checkpoint_in_a_compiled_function_gives_right_gradients(self):
        def function(x):
            return checkpoint(lambda t: t.exp().sin(), x).tanh()

        compiled = torch.compile(function, backend="aot_eager")
        expected = gradient(lambda x: x.exp().sin().tanh(), leaf())
        assert torch.equal(gradient(compiled, leaf()), expected)


class TestSegments:
    @pytest.mark.parametrize("segment", [checkpoint_segment, checkpoint_segment_flex])
    @pytest.mark.parametrize("count", [0, 1, 3, 10])
    def test_gradients_flow_to_all_inputs_and_captures(self, segment, count):
        def forward(call):
            captured = leaf()
            inputs = [leaf().detach().add(i).requires_grad_() for i in range(count)]
            call(
                inputs,
                lambda given: sum((t.sin() for t in given), captured.exp()).tanh(),
            ).sum().backward()
            return [captured.grad, *(tensor.grad for tensor in inputs)]

        plain = forward(lambda inputs, function: function(inputs))
        for found, expected in zip(forward(segment), plain, strict=True):
            assert torch.equal(found, expected)

    def test_the_function_gets_the_inputs_as_one_sequence(self):
        inputs = (leaf(), leaf())
        seen = []
        checkpoint_segment(inputs, lambda given: seen.append(given))
        assert seen[0][0] is inputs[0]
        assert seen[0][1] is inputs[1]

    def test_a_segment_is_one_region(self):
        with CheckpointProfiler() as profiler:
            checkpoint_segment([leaf(), leaf()], lambda t: (t[0] * t[1]).exp())
        assert profiler.checkpoint_count() == 1

    @pytest.mark.parametrize(
        ("inputs", "function", "found"),
        [
            (torch.ones(2), torch.exp, "got Tensor"),
            (iter([]), torch.exp, "got list_iterator"),
            ([torch.ones(2), 3], torch.exp, "got int among them"),
            ([torch.ones(2)], None, "got NoneType"),
        ],
    )
    def test_wrong_arguments_are_named(self, inputs, function, found):
        with pytest.raises(UsageError, match=found):
            checkpoint_segment(inputs, function)

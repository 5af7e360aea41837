"""Scopes: plain code in a block, forgotten in forward and replayed in backward."""

# Torch types what a module holds as Tensor | Module, and a gradient as maybe None.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import _thread
import copy
import re
import threading
import time
import uuid
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from recoup import (
    CheckpointManager,
    CheckpointProfiler,
    CheckpointScope,
    KeepSmall,
    keep,
)
from recoup.backend.memory.meters import StorageMeter
from recoup.errors import (
    ChangedTensorError,
    MismatchError,
    UnsupportedError,
    UsageError,
)
from tests.support.steps import (
    Block,
    Mlp,
    gradient,
    plain_call,
    problems,
    step,
    step_differences,
)
from tests.support.twin import leftovers
from tests.support.variants import fixed_weights
from tests.support.watching import CountingBackend, Memory, Replayed, saved_bytes

PROBLEMS = problems()
FLOAT_BYTES = 4


def scoped(model, *inputs):
    """Call a model inside one scope."""
    with CheckpointScope("model"):
        return model(*inputs)


def drifting_operator(steady_calls: int = 0):
    """An operator whose result grows with every call after some steady ones."""
    name = f"recoup_drift_{uuid.uuid4().hex}"
    calls = []

    @torch.library.custom_op(f"{name}::drift", mutates_args=())
    def drift(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + max(0, len(calls) - steady_calls)

    drift.register_autograd(lambda ctx, grad: grad)
    return f"{name}.drift.default", drift


def leaf(count: int = 10) -> Any:
    return torch.linspace(-1, 1, count, requires_grad=True)


class TestMaking:
    def test_a_scope_has_the_name_and_is_on(self):
        scope = CheckpointScope("layer1")
        assert (scope.name, scope.is_enabled, scope.use_recomputation) == (
            "layer1",
            True,
            True,
        )

    def test_the_second_argument_turns_it_off(self):
        assert not CheckpointScope("layer1", False).is_enabled

    @pytest.mark.parametrize("name", ["", "  ", None, 3, b"layer"])
    def test_a_name_that_says_nothing_is_refused(self, name):
        with pytest.raises(UsageError, match="expected a name for the scope"):
            CheckpointScope(name)

    def test_the_name_cannot_be_changed(self):
        with pytest.raises(AttributeError):
            CheckpointScope("layer1").name = "layer2"

    def test_an_unknown_way_to_verify_is_refused_with_the_known_ones(self):
        with pytest.raises(UsageError, match="'first', 'always', 'full', 'off'"):
            CheckpointScope("layer1", verify="sometimes")


class TestGradients:
    @pytest.mark.parametrize("name", PROBLEMS)
    def test_a_step_in_a_scope_leaves_what_the_plain_step_leaves(self, name):
        model, x = PROBLEMS[name]
        assert step_differences(model, scoped, x) == []

    @pytest.mark.parametrize("name", PROBLEMS)
    @pytest.mark.parametrize("use_recomputation", [True, False])
    @pytest.mark.parametrize("enabled", [True, False])
    def test_the_flags_change_no_bit(self, name, use_recomputation, enabled):
        def call(model, x):
            scope = CheckpointScope(
                "model", enabled, use_recomputation=use_recomputation
            )
            with scope:
                return model(x)

        model, x = PROBLEMS[name]
        assert step_differences(model, call, x) == []

    @pytest.mark.parametrize("verify", ["first", "always", "full", "off"])
    def test_verifying_changes_no_bit(self, verify):
        def call(model, x):
            with CheckpointScope("model", verify=verify):
                return model(x)

        model, x = PROBLEMS["attention"]
        assert step_differences(model, call, x) == []

    def test_twenty_steps_give_bitwise_the_same_losses(self):
        def losses(call):
            torch.manual_seed(0)
            model = nn.Sequential(Block(dropout=0.1), Block(dropout=0.1))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            x = torch.randn(2, 8, 16)
            found = []
            for _ in range(20):
                optimizer.zero_grad()
                loss = call(model, x).square().mean()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
            return found

        curve = losses(scoped)
        assert curve == losses(plain_call)
        assert curve[-1] < curve[0]

    def test_every_way_to_ask_for_gradients_gives_the_plain_ones(self):
        model, x = PROBLEMS["mlp"]
        expected = step(model, plain_call, x)["gradients"]["widen.weight"]
        weight = model.widen.weight

        def outputs():
            out = scoped(model, x)
            return out, fixed_weights([out])[0]

        out, weights = outputs()
        (by_grad,) = torch.autograd.grad(out, weight, weights)
        out, weights = outputs()
        out.backward(weights, inputs=[weight])
        by_inputs, weight.grad = weight.grad, None
        out, weights = outputs()
        torch.autograd.backward([out], [weights], inputs=[weight])
        by_backward, weight.grad = weight.grad, None
        for found in (by_grad, by_inputs, by_backward):
            assert torch.equal(found, expected)

    def test_frozen_parameters_get_no_gradient_and_change_no_other(self):
        model = copy.deepcopy(PROBLEMS["mlp"][0])
        model.widen.requires_grad_(False)
        assert step_differences(model, scoped, PROBLEMS["mlp"][1]) == []

    def test_no_input_has_to_require_a_gradient(self):
        model, x = PROBLEMS["mlp"]
        found = copy.deepcopy(model)
        scoped(found, x).sum().backward()
        expected = copy.deepcopy(model)
        expected(x).sum().backward()
        for left, right in zip(found.parameters(), expected.parameters(), strict=True):
            assert torch.equal(left.grad, right.grad)

    def test_a_shared_module_used_in_two_scopes_gets_the_sum(self):
        def twice(model, x):
            return scoped(model, scoped(model, x))

        def plain_twice(model, x):
            return model(model(x))

        model, x = PROBLEMS["mlp"]
        found, expected = step(model, twice, x), step(model, plain_twice, x)
        for name, wanted in expected["gradients"].items():
            assert torch.equal(found["gradients"][name], wanted)

    def test_first_and_second_derivatives_are_right(self):
        def function(x):
            with CheckpointScope("function"):
                return x.sin() * x.exp()

        x = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(function, x)
        assert torch.autograd.gradgradcheck(function, x)

    def test_a_loop_variable_that_moves_on_does_no_harm(self):
        factors = [2.0, 3.0, 5.0]

        def function(x):
            for i in range(3):
                with CheckpointScope(f"factor{i}"):
                    x = (lambda t: (t * factors[i]).sin())(x)
            return x

        def plain(x):
            for factor in factors:
                x = (x * factor).sin()
            return x

        assert torch.equal(gradient(function, leaf()), gradient(plain, leaf()))


class TestMemory:
    def test_a_scope_keeps_exactly_what_came_from_outside(self):
        batch, width = 32, 16
        model, x = Mlp(width), torch.randn(batch, width)
        # The first weight is needed in a replay only: x wants no gradient.
        first_weight = second_weight = 4 * width * width
        bias, activation = 4 * width, batch * 4 * width
        plain = x.numel() + second_weight + 2 * activation
        ours = x.numel() + second_weight + first_weight + bias
        assert saved_bytes(lambda: model(x)) == FLOAT_BYTES * plain
        assert saved_bytes(lambda: scoped(model, x)) == FLOAT_BYTES * ours

    def test_a_scope_that_is_off_saves_what_the_plain_run_saves(self):
        model, x = PROBLEMS["attention"]
        model.eval()

        def call():
            with CheckpointScope("off", enabled=False):
                return model(x)

        assert saved_bytes(call) == saved_bytes(lambda: model(x))

    def test_without_recomputation_it_keeps_what_the_plain_run_keeps(self):
        model, x = PROBLEMS["views"]
        scope = CheckpointScope("kept", use_recomputation=False)

        def call():
            with scope:
                return model(x)

        assert saved_bytes(call) == saved_bytes(lambda: model(x))
        out = call()
        assert scope.memory_bytes == saved_bytes(lambda: model(x))
        del out

    def test_memory_inside_is_freed_when_the_block_ends(self):
        x = leaf(1000)
        with CheckpointScope("block"):
            inner = x.exp()
            y = inner.sin()
            memory = Memory(inner)
            del inner
        assert memory.is_freed
        y.sum().backward()

    @pytest.mark.parametrize("backward", [True, False])
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"use_recomputation": False},
            {"policy": KeepSmall(1 << 20)},
            {"cache": True},
            {"verify": "full"},
        ],
        ids=str,
    )
    def test_a_finished_graph_frees_everything(self, options, backward):
        outside = leaf(1000) * 2
        scope = CheckpointScope("block", **options)
        with scope:
            # tanh saves its own output: the shortest way to a reference cycle.
            y = outside.exp().sin().tanh()
        memories = [Memory(outside), Memory(y)]
        del outside
        if backward:
            y.sum().backward()
        del y
        assert all(memory.is_freed for memory in memories)
        assert (scope.nodes, scope.memory_bytes) == ([], 0)

    def test_memory_bytes_count_a_storage_once(self):
        x = leaf(1000)
        scope = CheckpointScope("block")
        with scope:
            first = x.exp().sin()
        with scope:
            second = x.cos().tanh()
        assert scope.memory_bytes == 1000 * FLOAT_BYTES
        assert len(scope.nodes) == 2
        (first + second).sum().backward()

    def test_backward_holds_the_boundaries_and_one_segment(self):
        count, segments, length = 1 << 12, 8, 8
        nbytes = count * FLOAT_BYTES
        with StorageMeter() as meter:
            x = leaf(count)
            y = x
            for segment in range(segments):
                with CheckpointScope(f"segment{segment}", verify="off"):
                    for _ in range(length):
                        y = y.sin()
            y = y.sum()
            assert meter.live_bytes // nbytes == segments
            meter.reset_peak()
            y.backward()
        # Boundaries, one segment's values, a gradient and the product that makes
        # the next gradient, and its factor cos(y); plain holds segments * length.
        assert meter.peak_bytes < (segments + length + 4) * nbytes

    def test_the_step_needs_less_than_half_the_activations(self):
        def peak(call):
            torch.manual_seed(0)
            blocks = [Block(16) for _ in range(8)]
            x = torch.randn(4, 64, 16)
            with StorageMeter() as meter:
                for block in blocks:
                    x = call(block, x)
                x.sum().backward()
            return meter.peak_bytes

        assert peak(scoped) < 0.5 * peak(plain_call)


class TestReplay:
    def test_scoped_layers_are_replayed_once_and_the_others_never(self):
        # Each layer ends in an operator of its own that saves its result.
        endings = [torch.tanh, torch.sigmoid, torch.exp, torch.tan, torch.sqrt]
        names = ["tanh", "sigmoid", "exp", "tan", "sqrt"]

        def forward(scopes):
            x = torch.linspace(0.1, 1, 8, requires_grad=True)
            y = x
            for index, ending in enumerate(endings):
                with CheckpointScope(f"layer{index + 1}", index + 1 in scopes):
                    y = ending(y * 0.5)
            return x, y

        x, y = forward({1, 4})
        with Replayed() as replayed:
            y.sum().backward()
        twin, plain = forward(set())
        plain.sum().backward()
        assert torch.equal(x.grad, twin.grad)
        counts = [replayed.operators[name] for name in names]
        assert counts == [1, 0, 0, 1, 0]

    def test_only_ancestors_of_what_is_needed_are_replayed(self):
        x = leaf()
        with CheckpointScope("block"):
            needed = x.exp().sin().cos()
            for _ in range(5):
                x.tanh().sigmoid()
        with Replayed() as replayed:
            needed.sum().backward()
        # exp for its own derivative and sin's, sin for cos's; cos itself is not.
        assert dict(replayed.operators) == {"exp": 1, "sin": 1}

    def test_several_consumers_share_one_replay(self):
        x = leaf()
        scope = CheckpointScope("block")
        with scope:
            shared = x.exp()
            outputs = [shared.sin(), shared.cos(), shared.tanh()]
        (node,) = scope.nodes
        with Replayed() as replayed:
            sum(outputs).sum().backward(retain_graph=True)
        assert replayed.operators["exp"] == 1
        assert node.replay_count == 1

    @pytest.mark.parametrize(("cache", "replays"), [(False, 3), (True, 1)])
    def test_every_backward_replays_unless_cached(self, cache, replays):
        def function(x):
            scope = CheckpointScope("block", cache=cache)
            with scope:
                y = x.exp().sin().tanh()
            for _ in range(3):
                y.backward(torch.ones_like(y), retain_graph=True)
            assert scope.nodes[0].replay_count == replays
            return y

        def plain(x):
            y = x.exp().sin().tanh()
            for _ in range(3):
                y.backward(torch.ones_like(y), retain_graph=True)
            return y

        assert torch.equal(gradient(function, leaf()), gradient(plain, leaf()))

    @pytest.mark.parametrize("cache", [False, True])
    def test_a_backward_may_start_inside_another(self, cache):
        def function(x, region):
            with region:
                first = x.exp().sin()
                second = x.cos().tanh()
            total, inner = second.sum(), []
            first.register_hook(
                lambda grad: inner.extend(
                    torch.autograd.grad(total, x, retain_graph=True)
                )
            )
            (outer,) = torch.autograd.grad((first * second).sum(), x, retain_graph=True)
            return outer, inner[0]

        scope = CheckpointScope("block", cache=cache)
        found = function(leaf(), scope)
        expected = function(leaf(), nullcontext())
        assert all(map(torch.equal, found, expected))

    def test_a_cache_is_freed_with_the_graph(self):
        x = leaf(1000)
        with StorageMeter() as meter:
            with CheckpointScope("block", cache=True, verify="off"):
                y = x.exp().sin().tanh()
            y.backward(torch.ones_like(y), retain_graph=True)
            held = meter.live_bytes
            del y
            assert meter.live_bytes < held
            x.grad = None
            assert meter.live_bytes == 0

    def test_without_recomputation_nothing_is_replayed(self):
        model, x = PROBLEMS["attention"]
        with CheckpointScope("kept", use_recomputation=False):
            out = model(x)
        with Replayed() as replayed:
            out.sum().backward()
        assert replayed.total == 0

    def test_scopes_per_block_cost_at_most_a_third_more_arithmetic(self):
        def flops(call):
            torch.manual_seed(0)
            blocks = [Block(16) for _ in range(4)]
            x = torch.randn(2, 16, 16)
            with FlopCounterMode(display=False) as counter:
                for block in blocks:
                    x = call(block, x)
                x.sum().backward()
            return counter.get_total_flops()

        ratio = flops(scoped) / flops(plain_call)
        assert 1 < ratio <= 4 / 3


class TestReuse:
    def test_twelve_scopes_of_one_name_are_twelve_regions(self):
        manager = CheckpointManager()
        x = y = leaf()
        with manager, CheckpointProfiler() as profiler:
            for _ in range(12):
                with CheckpointScope("same"):
                    y = y.sin().exp()
        assert profiler.checkpoint_count() == 12
        assert [node.name for node in manager.nodes] == ["same"] * 12
        assert manager.scope_memory_bytes("same") == 12 * x.nbytes

    def test_one_scope_may_be_entered_again_and_recursively(self):
        scope = CheckpointScope("recursive")

        def recursive(x, depth):
            with scope:
                y = x.sin()
                return (recursive(y, depth - 1) if depth else y).exp()

        def plain(x, depth):
            y = x.sin()
            return (plain(y, depth - 1) if depth else y).exp()

        found = gradient(lambda x: recursive(x, 4), leaf())
        assert torch.equal(found, gradient(lambda x: plain(x, 4), leaf()))
        with torch.no_grad():
            recursive(leaf(), 2)
        assert scope.nodes == []

    @pytest.mark.parametrize("depth", [1, 2, 5])
    def test_scopes_nest_to_any_depth(self, depth):
        def nested(model, x, level=depth):
            if level == 0:
                return model(x)
            with CheckpointScope(f"level{level}"):
                return nested(model, x, level - 1)

        model, x = PROBLEMS["attention"]
        assert step_differences(model, nested, x) == []

    def test_an_outer_scope_drops_what_inner_scopes_keep(self):
        x = leaf(1000)
        with CheckpointScope("outer"):
            middle = x.exp()
            memory = Memory(middle)
            with CheckpointScope("inner"):
                y = middle.sin().tanh()
            del middle
            z = y.cos()
        del y
        assert memory.is_freed
        z.sum().backward()
        twin = leaf(1000)
        twin.exp().sin().tanh().cos().sum().backward()
        assert torch.equal(x.grad, twin.grad)

    def test_the_flag_counts_when_the_block_is_entered(self):
        scope = CheckpointScope("block")
        x = leaf()
        counts = []
        for enabled in (True, False, True):
            scope.is_enabled = enabled
            with CheckpointProfiler() as profiler, scope:
                scope.is_enabled = not enabled
                x.exp().sin()
            counts.append(profiler.checkpoint_count())
        assert counts == [1, 0, 1]

    def test_threads_may_share_a_scope(self):
        scope = CheckpointScope("shared")
        expected = gradient(lambda x: x.exp().sin().tanh(), leaf(100))
        found, errors = [], []
        start = threading.Barrier(4)

        def work():
            def function(x):
                with scope:
                    return x.exp().sin().tanh()

            try:
                start.wait()
                found.extend(gradient(function, leaf(100)) for _ in range(50))
            except Exception as error:  # noqa: BLE001 (shown below)
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len(found) == 200
        assert all(torch.equal(gradient_, expected) for gradient_ in found)
        assert scope.nodes == []


class TestLeaving:
    def test_closing_twice_does_nothing_more(self):
        scope = CheckpointScope("block")
        x = leaf()
        with scope:
            y = x.exp()
            scope.close()
            after = y.sin()
            scope.close()
        scope.close()
        with Replayed() as replayed:
            after.sum().backward()
        # sin came after the end: it keeps its input as plain code does.
        assert replayed.operators["sin"] == 0
        assert list(leftovers()) == []

    def test_an_exception_leaves_nothing_behind(self):
        outside = leaf(1000) * 2
        memory = Memory(outside)
        scope = CheckpointScope("block")

        def fail(x):
            with scope, CheckpointScope("inner"):
                x.exp().sin()
                raise KeyError("on purpose")

        with pytest.raises(KeyError, match="on purpose"):
            fail(outside)
        assert list(leftovers()) == []
        del outside
        assert (memory.is_freed, scope.nodes) == (True, [])
        expected = gradient(lambda x: x.exp().sin(), leaf())

        def function(x):
            with scope:
                return x.exp().sin()

        assert torch.equal(gradient(function, leaf()), expected)

    def test_closing_an_outer_scope_first_is_refused_and_harmless(self):
        outer, inner = CheckpointScope("outer"), CheckpointScope("inner")
        x = leaf()
        with outer, inner:
            with pytest.raises(UsageError, match="opened inside it"):
                outer.close()
            y = x.exp().sin()
        assert list(leftovers()) == []
        y.sum().backward()
        twin = leaf()
        twin.exp().sin().sum().backward()
        assert torch.equal(x.grad, twin.grad)

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_without_gradients_a_scope_does_nothing(self, mode):
        scope = CheckpointScope("block")
        with mode(), CheckpointProfiler() as profiler, scope:
            leaf().exp()
        assert (scope.nodes, profiler.checkpoint_count()) == ([], 0)


class TestErrors:
    def test_an_outside_tensor_that_changed_is_named_every_time(self):
        for _ in range(3):
            x = leaf(12)
            outside = (x * 2).view(3, 4)
            with CheckpointScope("block"):
                y = outside.exp().sin()
            outside.add_(1)
            with pytest.raises(ChangedTensorError, match=r"\(3, 4\).*aten\.exp"):
                y.sum().backward()

    def test_a_parameter_that_changed_is_named(self):
        model, x = copy.deepcopy(PROBLEMS["mlp"][0]), PROBLEMS["mlp"][1]
        out = scoped(model, x)
        with torch.no_grad():
            model.widen.weight.mul_(2)
        with pytest.raises(ChangedTensorError, match=r"\(64, 16\)|\(16, 64\)"):
            out.sum().backward()

    def test_a_write_behind_autograds_back_is_found_at_first_use(self):
        x = leaf()
        outside = x * 2
        with CheckpointScope("changed through data"):
            y = outside.exp().sin()
        outside.data.add_(1)
        with pytest.raises(MismatchError, match=r"changed through data.*aten\.exp"):
            y.sum().backward()

    @pytest.mark.parametrize(
        ("verify", "message"),
        [
            ("first", "recomputing {name} did not give what forward computed"),
            ("always", "recomputing {name} did not give what forward computed"),
            ("full", "{name} is the first operator that gave another result"),
        ],
    )
    def test_a_nondeterministic_operator_is_named_and_its_output_can_be_kept(
        self, verify, message
    ):
        name, drifting = drifting_operator()

        def forward(mark):
            x = leaf()
            with CheckpointScope("block", verify=verify):
                y = mark(drifting(x.exp())).sin().tanh()
            return x, y

        _, y = forward(lambda t: t)
        pattern = re.escape(message.format(name=name))
        with pytest.raises(MismatchError, match=f"'block'.*{pattern}"):
            y.sum().backward()
        assert list(leftovers()) == []
        x, y = forward(keep)
        y.sum().backward()
        assert x.grad is not None

    def test_later_uses_are_verified_on_request(self):
        def raises(verify):
            # The drift begins with the third forward.
            name, drifting = drifting_operator(steady_calls=4)
            found = []
            for _ in range(3):
                with CheckpointScope(name, verify=verify):
                    y = drifting(leaf()).sin()
                try:
                    y.sum().backward()
                    found.append(False)
                except MismatchError:
                    found.append(True)
            return found

        assert raises("always") == [False, False, True]
        assert raises("first") == [False, False, False]

    def test_a_second_backward_through_a_freed_graph_is_an_error(self):
        with CheckpointScope("block"):
            y = leaf().exp().sin().sum()
        y.backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.backward()
        assert list(leftovers()) == []

    def test_a_scope_under_torch_func_says_what_to_do(self):
        def function(x):
            with CheckpointScope("block"):
                return x.sin().exp().sum()

        with pytest.raises(UnsupportedError, match=r"block.*torch\.autograd\.grad"):
            torch.func.grad(function)(torch.ones(3))
        assert list(leftovers()) == []

    def test_torch_func_inside_a_scope_says_what_to_do(self):
        with (
            pytest.raises(UnsupportedError, match="block"),
            CheckpointScope("block"),
        ):
            torch.func.grad(lambda x: x.sin().sum())(leaf())
        assert list(leftovers()) == []


class TestCompilation:
    def test_a_compiled_function_inside_gives_right_gradients(self):
        function = torch.compile(lambda x: x.exp().sin().tanh(), backend="aot_eager")

        def inside(x):
            with CheckpointScope("block"):
                return function(x)

        assert torch.equal(
            gradient(inside, leaf()), gradient(lambda x: x.exp().sin().tanh(), leaf())
        )

    def test_recoup_itself_is_never_compiled(self):
        torch._dynamo.reset()
        backend = CountingBackend()
        function = torch.compile(lambda x: x.exp().sin().tanh(), backend=backend)
        with CheckpointScope("block"):
            y = function(leaf())
        y.sum().backward()
        # At most the function's own graph, however the scope treats it.
        assert backend.compiled <= 1

    def test_a_scope_in_a_compiled_function_changes_no_gradient(self, recwarn):
        torch._dynamo.reset()

        def function(x):
            with CheckpointScope("block"):
                y = x.exp().sin()
            return y.tanh()

        compiled = torch.compile(function, backend="aot_eager")
        assert torch.equal(gradient(compiled, leaf()), gradient(function, leaf()))
        assert [str(warning.message) for warning in recwarn] == []


def test_a_scope_can_be_made_where_no_function_called_for_it():
    # The first frame of such a thread is that of `__init__`: nobody is above it.
    scope = CheckpointScope.__new__(CheckpointScope)
    _thread.start_new_thread(scope.__init__, ("alone",))
    deadline = time.monotonic() + 10
    while not hasattr(scope, "use_recomputation") and time.monotonic() < deadline:
        time.sleep(0.001)
    x = torch.ones(3, requires_grad=True)
    with scope:
        y = x.exp().sin()
    y.sum().backward()
    assert scope.name == "alone"
    assert x.grad is not None

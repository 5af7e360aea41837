"""The autograd border: hooks, the running backward, runs below autograd."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recoup.backend.autograd.saved_tensors import (
    ambient_hooks,
    at_end_of_backward,
    below_autograd,
    current_backward,
    hooks_refused,
    pop_hooks,
    pull_gradients,
    push_hooks,
    records_gradients,
)


def leaf():
    return torch.ones(3, requires_grad=True)


def packed(tensor):
    return tensor.detach()


def unpacked(tensor):
    return tensor


class TestHooks:
    def test_pushed_hooks_are_the_ambient_ones_until_popped(self):
        assert ambient_hooks() is None
        push_hooks(packed, unpacked)
        try:
            assert ambient_hooks() == (packed, unpacked)
        finally:
            pop_hooks()
        assert ambient_hooks() is None

    def test_the_innermost_hooks_win_alone(self):
        seen = []
        push_hooks(lambda t: seen.append("outer") or packed(t), unpacked)
        push_hooks(lambda t: seen.append("inner") or packed(t), unpacked)
        try:
            leaf().exp()
        finally:
            pop_hooks()
            pop_hooks()
        assert seen == ["inner"]

    def test_hooks_are_those_of_the_public_context_manager(self):
        with torch.autograd.graph.saved_tensors_hooks(packed, unpacked):
            assert ambient_hooks() == (packed, unpacked)

    def test_a_saved_tensor_comes_with_its_graph(self):
        # Why holds are detached: else an operator's own output would be a cycle.
        seen = []
        push_hooks(lambda t: seen.append(t.grad_fn is not None) or packed(t), unpacked)
        try:
            y = leaf().exp()
        finally:
            pop_hooks()
        assert seen == [True]
        del y

    def test_a_detached_alias_in_a_pack_hook_shares_the_version(self):
        aliases = []

        def pack(tensor):
            aliases.append(tensor.detach())
            return aliases[-1]

        x = leaf() * 2
        push_hooks(pack, unpacked)
        try:
            y = x.sin()
        finally:
            pop_hooks()
        x.add_(1)
        assert aliases[0]._version == x._version == 1
        del y

    def test_hooks_are_refused_where_torch_func_refuses_them(self):
        assert hooks_refused() is None
        reasons = []

        def function(x):
            reasons.append(hooks_refused())
            return x.sum()

        torch.func.grad(function)(torch.ones(3))
        assert "saved tensor hooks" in reasons[0]
        assert hooks_refused() is None

    def test_vmap_alone_refuses_nothing(self):
        reasons = []
        torch.func.vmap(lambda x: reasons.append(hooks_refused()) or x)(torch.ones(3))
        assert reasons == [None]


class TestBackward:
    def test_outside_of_a_backward_there_is_no_number(self):
        assert current_backward() == -1

    def test_every_backward_has_a_number_of_its_own(self):
        numbers = []
        x = leaf()
        y = x * 2
        y.register_hook(lambda grad: numbers.append(current_backward()))
        for _ in range(2):
            y.sum().backward(retain_graph=True)
        assert -1 not in numbers
        assert numbers[0] != numbers[1]

    def test_a_call_at_the_end_comes_after_every_gradient(self):
        events = []
        x = leaf()
        y = x * 2

        def hook(grad):
            events.append("hook")
            at_end_of_backward(lambda: events.append("end"))

        y.register_hook(hook)
        x.register_hook(lambda grad: events.append("leaf"))
        y.sum().backward()
        assert events == ["hook", "leaf", "end"]

    def test_an_error_at_the_end_reaches_whoever_called_backward(self):
        def fail():
            raise KeyError("at the end")

        y = leaf() * 2
        y.register_hook(lambda grad: at_end_of_backward(fail))
        with pytest.raises(KeyError, match="at the end"):
            y.sum().backward()

    def test_outside_of_a_backward_there_is_no_end(self):
        with pytest.raises(RuntimeError):
            at_end_of_backward(lambda: None)


class TestBelowAutograd:
    def test_no_graph_is_built(self):
        with below_autograd():
            y = leaf().exp()
        assert y.grad_fn is None
        assert leaf().exp().grad_fn is not None

    def test_the_gradient_mode_is_off_and_put_back(self):
        with below_autograd():
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled()

    def test_with_the_gradient_mode_on_there_is_still_no_graph(self):
        with below_autograd(), torch.enable_grad():
            assert leaf().exp().grad_fn is None

    def test_autocast_is_off_and_put_back(self):
        x = torch.ones(2, 2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with below_autograd():
                assert torch.mm(x, x).dtype is torch.float32
            assert torch.mm(x, x).dtype is torch.bfloat16

    def test_dispatch_modes_still_see_operators(self):
        names = []

        class Seen(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                names.append(str(func))
                return func(*args, **(kwargs or {}))

        x = leaf()
        with Seen(), below_autograd():
            x.exp()
        assert names == ["aten.exp.default"]


class TestRecording:
    def test_gradients_are_recorded_unless_switched_off(self):
        assert records_gradients()
        with torch.no_grad():
            assert not records_gradients()
            with torch.enable_grad():
                assert records_gradients()
        with torch.inference_mode():
            assert not records_gradients()


def test_pulled_gradients_are_those_of_autograd_grad():
    x = torch.randn(3, requires_grad=True)
    w = torch.randn(3, requires_grad=True)
    unused = torch.randn(3, requires_grad=True)
    cotangent = torch.randn(3)
    expected = torch.autograd.grad(
        x.sin() * w, [x, w, unused], cotangent, allow_unused=True
    )
    found = pull_gradients([x.sin() * w], [x, w, unused], [cotangent])
    assert torch.equal(found[0], expected[0])  # pyright: ignore[reportArgumentType]
    assert torch.equal(found[1], expected[1])  # pyright: ignore[reportArgumentType]
    assert found[2] is None
    assert x.grad is None


def test_a_gradient_that_has_arrived_already_is_added_first():
    w = torch.tensor(1e-16, dtype=torch.float64, requires_grad=True)
    before = torch.tensor(1.0, dtype=torch.float64)
    tiny = torch.tensor(2.0**-53, dtype=torch.float64)
    # (1 + tiny) + tiny is 1, 1 + (tiny + tiny) is more.
    found = pull_gradients(
        [w * tiny + w * tiny, w], [w], [torch.ones(()).double(), before]
    )
    assert found[0] == 1.0

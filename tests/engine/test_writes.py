"""Writes happen once, in forward; a replay reproduces the version that was saved."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from recoup import CheckpointGroup, CheckpointScope, KeepCostly, KeepSmall, keep
from recoup.engine.recording.region import STATE_BYTES
from recoup.errors import ChangedTensorError
from tests.support.twin import Region, compare, plain
from tests.support.writes import (
    BODIES,
    SAVING,
    Body,
    buffer_takes_a_statistic,
    buffer_written_then_read,
    in_place_chain,
    linear_of_a_vector,
)

always = functools.partial(CheckpointScope, verify="always")
REGIONS = [
    pytest.param(always, id="recompute"),
    pytest.param(functools.partial(always, policy=KeepSmall(10**9)), id="keep all"),
    pytest.param(functools.partial(always, use_recomputation=False), id="plain"),
    pytest.param(
        functools.partial(CheckpointScope, verify="full"), id="full verification"
    ),
]


def around(body: Body, place: str) -> Any:
    """Return a step with the body in a region, in two, or partly in an inner one."""

    def step(region: Region) -> dict[str, Any]:
        given = torch.randn(4, 4, requires_grad=True)
        buffer = torch.randn(4, 4)
        x = given * 1
        with region("outer") if place == "inner" else plain():
            with region("body"):
                y = body(x, buffer)
            if place == "inner":
                if body not in SAVING:
                    buffer.detach().sub_(0.5)
                y = (y * 2).tanh()
        if place == "twice":
            with region("body"):
                y = y + body(x.sin(), buffer)
        # Twice: a replay must not write to what the next one starts from.
        loss = y.sum()
        first = torch.autograd.grad(loss, given, retain_graph=True)
        loss.backward()
        return {
            "gradients": [first, given.grad],
            "buffer": buffer.detach(),
            "y": y,
        }

    return step


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("region", REGIONS)
def test_a_write_in_a_region_is_bitwise_the_twins(body, region):
    assert compare(around(body, "alone"), region) == []


@pytest.mark.parametrize("body", BODIES)
def test_a_write_in_a_nested_region_is_bitwise_the_twins(body):
    assert compare(around(body, "inner"), always) == []


@pytest.mark.parametrize(
    "body",
    [
        buffer_written_then_read,
        buffer_takes_a_statistic,
        in_place_chain,
    ],
)
def test_a_region_run_twice_writes_its_buffer_twice_as_the_twin_does(body):
    # Small buffers written in the region are copied, so the next run may write again.
    assert compare(around(body, "twice"), always) == []


def test_a_saved_value_is_given_back_as_it_was_although_it_was_written_to_since():
    # Plain autograd refuses this: it has only the memory, and that has changed.
    x = torch.randn(4, requires_grad=True)
    with always("block"):
        y = x * 2
        z = y.sin()
        y.add_(1)
        w = y.sin()
        y[1:].zero_()
    (ours,) = torch.autograd.grad(z.sum() + w.sum(), x)
    (twins,) = torch.autograd.grad((x * 2).sin().sum() + (x * 2 + 1).sin().sum(), x)
    assert torch.equal(ours, twins)


def test_writes_to_the_input_of_a_region_are_seen_by_the_caller():
    def step(region: Region) -> dict[str, Any]:
        x = torch.randn(4, requires_grad=True)
        h = x * 2
        with region("block"):
            h.mul_(x.exp())
            h[1:].add_(1)
            y = h.sin()
        (y * h).sum().backward()
        return {"x": x.grad, "h": h}

    assert compare(step, always) == []


def test_a_view_of_the_input_written_inside_is_seen_by_the_caller():
    def step(region: Region) -> dict[str, Any]:
        x = torch.randn(4, 4, requires_grad=True)
        h = x * 2
        view = h[1:]
        with region("block"):
            view.mul_(2)
            h.T[0].add_(1)
            y = view.exp().sin()
        (y.sum() + h.sum()).backward()
        return {"x": x.grad, "h": h, "view": view}

    assert compare(step, always) == []


def test_a_cache_of_keys_grows_across_regions_as_in_the_twin():
    def step(region: Region) -> dict[str, Any]:
        weight = torch.randn(4, 4, requires_grad=True)
        cache = torch.zeros(6, 4)
        losses = []
        for place in range(6):
            with region("step"):
                key = torch.randn(4) @ weight
                with torch.no_grad():
                    cache[place] = key
                losses.append((cache[: place + 1].clone() @ key).softmax(0).max())
        torch.stack(losses).sum().backward()
        return {"weight": weight.grad, "cache": cache}

    assert compare(step, always) == []


# Held by reference from here on, and so noticed.


def changed_after(used: Callable[[Tensor, Tensor], Tensor], source: str) -> Tensor:
    x = torch.randn(4, 4, requires_grad=True)
    outside = {
        "buffer": lambda: torch.randn(4, 4),
        "leaf": lambda: torch.randn(4, 4, requires_grad=True),
        "result": lambda: x.sin(),
        "view": lambda: torch.randn(8, 4)[::2],
    }[source]()
    with CheckpointScope("block", verify="off"):
        y = used(x, outside)
    with torch.no_grad():
        outside.add_(1)
    return y


USES = {
    "only read": lambda x, t: ((t * 2).detach() * x).exp(),
    "saved": lambda x, t: (t * x).exp(),
    "a view of it": lambda x, t: ((t.T[1:] * 2).detach() * x[1:]).exp(),
    "both": lambda x, t: ((t + 1).detach() * t * x).exp(),
}


@pytest.mark.parametrize("source", ["buffer", "leaf", "result", "view"])
@pytest.mark.parametrize("use", USES)
def test_a_tensor_changed_after_the_region_that_used_it_is_an_error(use, source):
    y = changed_after(USES[use], source)
    with pytest.raises(ChangedTensorError, match=r"shape \(.*4\)") as caught:
        y.sum().backward()
    assert "version" in str(caught.value)


@pytest.mark.parametrize("use", USES)
def test_a_tensor_changed_after_two_nested_regions_is_an_error(use):
    x, t = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    with CheckpointScope("outer", verify="off"), CheckpointScope("in", verify="off"):
        y = USES[use](x, t)
    t.add_(1)
    with pytest.raises(ChangedTensorError):
        y.sum().backward()


@pytest.mark.parametrize("use", USES)
def test_a_tensor_changed_after_hooks_took_it_over_is_the_twins_or_an_error(use):
    # On the CPU `save_on_cpu` keeps the very tensor it is given.
    def step(region: Region) -> dict[str, Any]:
        x, t = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
        with save_on_cpu(), region("block", verify="off"):
            y = USES[use](x, t.clone() if use == "saved" else t)
        t.add_(1)
        y.sum().backward()
        return {"x": x.grad}

    try:
        assert compare(step, CheckpointScope) == []
    except ChangedTensorError:
        return


def test_a_root_of_an_inner_region_may_be_written_to_in_the_outer_one():
    def step(region: Region) -> dict[str, Any]:
        x, t = torch.randn(4, requires_grad=True), torch.randn(4)
        with region("outer"):
            with region("inner"):
                y = (x * 2 + t).exp()
            t.add_(1)
        y.sum().backward()
        return {"x": x.grad, "t": t}

    assert compare(step, always) == []


def test_a_saved_tensor_changed_by_a_foreach_operator_in_the_region_is_an_error():
    # Under a dispatch mode these operators move no version counter by themselves.
    x, t = torch.randn(4, requires_grad=True), torch.randn(4)
    with CheckpointScope("block", verify="off"):
        y = t * x
        with torch.no_grad():
            torch.ops.aten._foreach_add_([x * 2, t], 1.0)
    with pytest.raises(ChangedTensorError):
        y.sum().backward()


def test_a_saved_tensor_transposed_and_then_written_to_in_the_region_is_an_error():
    x, t = torch.randn(2, 2, requires_grad=True), torch.randn(2, 2)
    with CheckpointScope("block", verify="off"):
        y = t * x
        z = ((t * 3) * x).sin()
        t.t_()
        t.add_(1)
    with pytest.raises(ChangedTensorError):
        y.sum().backward()
    del z


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_tensor_that_joins_a_graph_when_another_is_transposed_is_held_without(
    is_nested,
):
    # A view made without gradients gets its base's graph when that is changed in place,
    # and torch allows no view of it from then on.
    def step(region: Region) -> dict[str, Tensor | None]:
        given = torch.randn(4, 4, requires_grad=True)
        x = given * 2
        with torch.no_grad():
            view = x.view(4, 4)
        with region("outer") if is_nested else plain(), region("block"):
            with torch.no_grad():
                factor = view.exp()
            y = (given.sin() * factor).sum()
            x.t_()
        (y + x.sum()).backward()
        return {"gradient": given.grad}

    assert compare(step, CheckpointScope) == []


def test_one_of_several_views_may_be_read_after_a_write_to_all_of_them():
    def step(region: Region) -> dict[str, Tensor | None]:
        given = torch.randn(4, 4, requires_grad=True)
        x = given * 2
        view = x.unbind(0)[0]
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified inplace"):
            _ = view.is_leaf  # from here on torch says nothing about its graph
        with region("block"):
            with torch.no_grad():
                factor = view + 1
            y = (given.sin() * factor).sum()
        y.backward()
        return {"gradient": given.grad}

    assert compare(step, always) == []


@pytest.mark.parametrize(
    "write",
    [
        lambda y, x: y.add_(x.cumsum(0)),
        lambda y, x: y.copy_(x.cumsum(0)),
    ],
    ids=["add", "copy"],
)
def test_a_write_through_data_that_lies_in_another_way_is_bitwise_the_twins(write):
    def step(region: Region) -> dict[str, Any]:
        x = torch.randn(3, 3, requires_grad=True)
        with region("moved"):
            y = x * 2
            y.data = y.data.t()
            write(y, x)
            z = y.exp() * y.sin()
        z.sum().backward()
        return {"gradient": x.grad, "z": z}

    assert compare(step, functools.partial(CheckpointScope, verify="off")) == []


@torch.library.custom_op("recoup_tests::fill_sums", mutates_args=("y",))
def fill_sums(y: Tensor, x: Tensor) -> None:
    y.copy_(x.cumsum(0))


@pytest.mark.parametrize("moved", [True, False])
@pytest.mark.parametrize(
    "write",
    [
        lambda y, x: torch.cumsum(x, 0, out=y),
        lambda y, x: torch.cat([x, x.cumsum(0)], out=y),  # gets more room
        fill_sums,
    ],
    ids=["out", "resized", "custom"],
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_result_written_where_data_was_moved_is_bitwise_the_twins(write, moved):
    def step(region: Region) -> dict[str, Any]:
        x = torch.randn(3, 3, requires_grad=True)
        with region("moved"):
            y = x.detach() * 2
            if moved:
                y.data = y.data.t()
            write(y, x.detach())
            z = (y * y.sin()).sum() * x.exp() * (y[:3].cos() * x)
        z.sum().backward()
        return {"gradient": x.grad, "z": z}

    assert compare(step, functools.partial(CheckpointScope, verify="off")) == []


class Keeper(torch.autograd.Function):
    """Returns its input, and saves something beside it for nothing."""

    @staticmethod
    def forward(context: Any, x: Tensor, beside: Tensor) -> Tensor:
        context.save_for_backward(beside)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def test_what_autograd_saved_is_copied_once_an_operator_uses_it_after_a_failed_write():
    def step(region: Region) -> dict[str, Any]:
        x, buffer = torch.randn(3, requires_grad=True), torch.ones(3)
        with region("failed"):
            y = Keeper.apply(x, buffer)
            with contextlib.suppress(RuntimeError):
                buffer.add_(torch.ones(99))
            z = (y * (x.detach() * buffer)).exp()
            buffer.add_(1)
        z.sum().backward()
        return {"gradient": x.grad, "buffer": buffer}

    assert compare(step, always) == []


def test_a_statistic_that_the_region_moves_and_reads_is_bitwise_the_twins():
    def step(region: Region) -> dict[str, Any]:
        norm = nn.BatchNorm1d(4)
        x = torch.randn(6, 4, requires_grad=True)
        with region("norm"):
            first = norm(x) * norm.running_mean
            assert norm.running_var is not None
            second = norm(first.relu()) * norm.running_var.sqrt()
            third = norm.eval()(second) * norm.num_batches_tracked
        third.pow(2).sum().backward()
        return {
            "gradient": x.grad,
            "weight": norm.weight.grad,
            "statistics": [norm.running_mean, norm.running_var],
            "count": norm.num_batches_tracked,
        }

    assert compare(step, always) == []


def test_the_error_names_the_operator_that_used_the_tensor():
    x, t = torch.randn(4, requires_grad=True), torch.randn(4)
    with CheckpointScope("block", verify="off"):
        y = (t.tanh() * x).exp()
    t.add_(1)
    with pytest.raises(ChangedTensorError, match=r"\(4,\).*aten\.tanh"):
        y.sum().backward()


def test_a_changed_tensor_that_no_living_graph_needs_is_no_error():
    x, t = torch.randn(4, requires_grad=True), torch.randn(4)
    with CheckpointScope("block", verify="off"):
        y = x.exp().sin()
        z = (t.tanh() * x).exp()
    del z
    t.add_(1)
    y.sum().backward()


def test_a_saved_tensor_changed_in_a_nested_region_is_no_error_until_it_is_needed():
    def step(region: Region) -> dict[str, Any]:
        x = torch.randn(4, requires_grad=True)
        h = x * 1
        with region("outer"), region("inner"):
            y = h.square()
            h.add_(1)
        h.sum().backward()
        return {"x": x.grad, "y": y.detach()}

    assert compare(step, always) == []


def test_a_parameter_updated_before_backward_is_an_error():
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(2, 4)
    with CheckpointScope("block", verify="off"):
        y = layer(x).exp()
    layer.weight.grad = torch.ones(4, 4)
    optimizer.step()
    with pytest.raises(ChangedTensorError):
        y.sum().backward()


def test_a_large_state_that_two_regions_write_is_an_error_not_a_copy():
    x = torch.randn(4, requires_grad=True)
    state = torch.zeros(STATE_BYTES // 4 + 1)
    ys = []
    for _ in range(2):
        with CheckpointScope("block", verify="off"):
            state.add_(1)
            ys.append((x * state.sum()).sin() * state[:4].exp() * x)
    with pytest.raises(ChangedTensorError):
        torch.stack(ys).sum().backward()


def test_a_small_state_that_two_regions_write_is_copied():
    def step(region: Region) -> dict[str, Any]:
        x = torch.randn(4, requires_grad=True)
        state = torch.zeros(4)
        ys = []
        for _ in range(2):
            with region("block"):
                state.add_(1)
                ys.append((x * (state * 2).exp()).sin())
        torch.stack(ys).sum().backward()
        return {"x": x.grad, "state": state}

    assert compare(step, always) == []


def test_a_kept_output_written_to_after_the_region_is_an_error_or_right():
    def step(region: Region) -> dict[str, Any]:
        x = torch.randn(4, requires_grad=True)
        with region("block"):
            y = keep(x * 2)
            z = (y + 1).exp()
        y.add_(1)
        (z.sum() + y.sum()).backward()
        return {"x": x.grad}

    try:
        assert compare(step, always) == []
    except ChangedTensorError:
        return


def test_a_policy_survives_the_views_that_torch_makes_in_place():
    region = functools.partial(CheckpointScope, verify="always", policy=KeepCostly())
    assert compare(around(linear_of_a_vector, "alone"), region) == []


def test_a_write_between_two_calls_of_a_group_is_the_twins_or_an_error():
    def step(region: Region) -> dict[str, Any]:
        group = CheckpointGroup("between")
        x = torch.randn(4, requires_grad=True)

        def call(value: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
            if region is plain:
                return function(value)
            return group.checkpoint_fn(value, function)

        y = call(x, lambda t: t.sin() * 2)
        y.add_(1)
        z = call(y, lambda t: t.exp().sin())
        z.sum().backward()
        return {"x": x.grad}

    for _ in range(3):  # Only the first use of a group is verified.
        try:
            assert compare(step, CheckpointScope) == []
        except ChangedTensorError:
            continue


def test_a_buffer_written_between_two_calls_of_a_group_is_the_twins_or_an_error():
    def step(region: Region) -> dict[str, Any]:
        group = CheckpointGroup("buffer between")
        x, buffer = torch.randn(4, requires_grad=True), torch.randn(4)

        def call(function: Callable[[Tensor], Tensor]) -> Tensor:
            if region is plain:
                return function(x)
            return group.checkpoint_fn(x, function)

        y = call(lambda t: (t * buffer.exp()).sin())
        buffer.add_(1)
        z = call(lambda t: (t * buffer.exp()).cos())
        (y + z).sum().backward()
        return {"x": x.grad}

    for _ in range(3):
        try:
            assert compare(step, CheckpointScope) == []
        except ChangedTensorError:
            continue


def test_storages_of_dead_tensors_are_not_confused_with_new_ones():
    # The allocator gives the same address again at once.
    def step(region: Region) -> dict[str, Any]:
        x = torch.randn(64, requires_grad=True)
        total = x.sum()
        with region("block"):
            for number in range(50):
                t = (x * number).sin()
                total = total + (t * t).sum()
                del t
                u = torch.full((64,), float(number))
                total = total + (u * x).sin().sum()
                del u
        total.backward()
        return {"x": x.grad}

    assert compare(step, always) == []


class Scaled(nn.Module):
    """Uses its parameter as it is, and needs a value that the parameter made."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).tanh().sin()


def gradient_after_other_memory(region) -> Tensor:
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(3, dtype=torch.float64)
    for other_memory in (False, False, True):  # verified by then
        model.weight.grad = None
        with region:
            y = model(x)
        if other_memory:
            model.weight.data = torch.randn(3, dtype=torch.float64)
        y.sum().backward()
    assert model.weight.grad is not None
    return model.weight.grad


def test_a_parameter_that_got_other_memory_before_backward_is_an_error():
    with pytest.raises(ChangedTensorError, match=r"mul.*`\.data`"):
        gradient_after_other_memory(CheckpointScope("block"))


def test_where_nothing_is_replayed_other_memory_is_seen_as_without_a_region():
    expected = gradient_after_other_memory(contextlib.nullcontext())
    kept = CheckpointScope("block", use_recomputation=False)
    assert torch.equal(gradient_after_other_memory(kept), expected)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_operator_writes_to_several_values_that_an_inner_region_used(order):
    def gradient(region: Region) -> Tensor:
        weight = torch.linspace(0.1, 1, 4, dtype=torch.float64, requires_grad=True)
        outside = weight * 3
        with region("outer"):
            with region("inner"):
                inside = (outside + outside).tanh_()
                last = inside + inside
            targets = [outside, last]
            chosen = [targets[place] for place in order]
            torch.ops.aten._foreach_mul_(chosen, 2.0)
        (last.sum() + outside.sum()).backward()
        assert weight.grad is not None
        return weight.grad

    assert torch.equal(gradient(CheckpointScope), gradient(plain))


@pytest.mark.parametrize("policy", [None, KeepCostly()])
def test_a_cache_for_several_backwards_asks_again_for_what_a_region_around_holds(
    policy,
):
    """The first backward fetches `x`, which is written to before the second one."""

    def gradient(outer: Any, inner: Any) -> Tensor:
        weight = torch.linspace(-1, 1, 4, requires_grad=True)
        x = torch.linspace(-2, 2, 4)
        x.mul_(weight)
        with outer:
            with inner:
                first, second = x.relu(), (x * 1.5).exp()
            first.sum().backward(retain_graph=True)
            x.mul_(2)
        (first.sum() + second.sum()).backward()
        assert weight.grad is not None
        return weight.grad

    outer = CheckpointScope("outer", verify="off", policy=policy)
    inner = CheckpointScope("inner", verify="off", cache=True)
    plain = gradient(contextlib.nullcontext(), contextlib.nullcontext())
    assert torch.equal(gradient(outer, inner), plain)


@pytest.mark.parametrize("verify", ["off", "always"])
@pytest.mark.parametrize("read", [torch.mul, lambda a, b: a.t() @ b])
def test_a_cache_for_several_backwards_never_serves_a_parameter_that_has_changed(
    verify, read
):
    """The first backward reads it to recompute; a region inside saved it as well."""
    weight = torch.linspace(-1, 1, 4).reshape(2, 2).requires_grad_()
    other = torch.linspace(-2, 2, 4).reshape(2, 2).requires_grad_()
    with (
        CheckpointScope("around", verify="off"),
        CheckpointScope("cached", verify=verify, cache=True),
    ):
        first = (weight * 2).exp()
        with CheckpointScope("inside", verify="off"):
            second = read(weight, other)
    first.sum().backward(retain_graph=True)
    with torch.no_grad():
        weight.sub_(1)
    with pytest.raises(ChangedTensorError, match="at version 1"):
        second.sum().backward()

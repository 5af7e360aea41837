"""Regions inside a function that is called again: they work in the second call."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from recoup import (
    CheckpointScope,
    Disk,
    Host,
    KeepCostly,
    checkpoint,
    checkpoint_module,
    rerun,
)
from recoup.backend.memory.meters import StorageMeter
from recoup.backend.operators.timers import OperatorTimer
from recoup.checkpointing import is_recomputing
from recoup.errors import MismatchError
from recoup.measurement.tracing.tracer import StepTracer
from tests.support.steps import gradient
from tests.support.twin import plain
from tests.support.watching import saved_bytes
from tests.support.wrapping import Pair, begin_fake_group, end_fake_group, mesh_of_two

X = torch.linspace(-1, 1, 12, dtype=torch.float64)


def torch_call(function: Callable[..., Any], *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False)


def twice(function: Callable[..., Any], *args: Any) -> Any:
    return rerun(rerun, function, *args)


def both(function: Callable[..., Tensor], call: Callable[..., Any]) -> list[Tensor]:
    """Return the gradients of a function of a scope, plain and called again."""
    return [
        gradient(lambda x: function(plain, x * 1), X),
        gradient(lambda x: call(function, CheckpointScope, x * 1), X),
    ]


def writing(scope: Any, x: Tensor) -> Tensor:
    y = x * 2
    with scope("writes", verify="always"):
        z = y.exp().sin()  # reads y, which is then written to
        y.mul_(3)
    return z


@pytest.mark.parametrize("call", [rerun, twice, torch_call, checkpoint])
def test_a_region_inside_may_write_to_what_it_has_read(call):
    assert torch.equal(*both(writing, call))


def in_scope(function: Callable[..., Any], *args: Any) -> Any:
    with CheckpointScope("outside"):
        return rerun(function, *args)


@pytest.mark.parametrize("tier", [Host, Disk])
@pytest.mark.parametrize("call", [rerun, twice, in_scope, torch_call])
def test_a_region_inside_may_keep_tensors_in_a_tier(call, tier):
    def function(scope: Any, x: Tensor) -> Tensor:
        with scope("tier", store=tier(smallest_bytes=0)), scope("inside"):
            places = torch.tensor([0, 1, 1, 3])  # it is gone when the regions end
            return x[places].exp() * x[:4]

    assert torch.equal(*both(function, call))


def test_what_else_is_alive_makes_no_difference():
    kept: list[Tensor] = []

    def function(scope: Any, x: Tensor) -> Tensor:
        other = x * 3
        with scope("region"):
            unused = other.exp().sin()
            y = x.cos().tanh()
            if not is_recomputing():
                kept.append(unused)  # so its graph is there at the end of the region
            del unused
        return y

    assert torch.equal(*both(function, rerun))


def test_the_function_may_catch_what_stops_it():
    def function(scope: Any, x: Tensor) -> Tensor:
        y = x
        for _ in range(2):
            try:
                with scope("region"):
                    y = y.exp().sin()
            except Exception:  # noqa: BLE001 (as users write it)
                y = y.tanh()
        return y.cos() if is_recomputing() else y

    assert torch.equal(*both(function, rerun))


def test_user_code_runs_once_more_for_each_function_around_it():
    seen: list[bool] = []

    def function(scope: Any, x: Tensor) -> Tensor:
        seen.append(is_recomputing())
        with scope("region"):
            return x.exp().sin()

    both(function, rerun)
    assert seen == [False, False, True]  # the first is the plain one
    seen.clear()
    both(function, twice)
    assert seen == [False, False, True, True]


def test_a_buffer_is_read_as_the_first_call_found_it():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Buffer(torch.linspace(1, 2, 12, dtype=X.dtype))

        def forward(self, x: Tensor) -> Tensor:
            with CheckpointScope("scaled"):
                return (x * self.scale).sin() * self.scale.exp()

    model = Scaled()
    expected = gradient(model, X)

    def function(x: Tensor) -> Tensor:
        y = rerun(model, x)
        model.scale.add_(1)
        return y

    assert torch.equal(gradient(function, X), expected)


def blocks(scope: Any, x: Tensor) -> Tensor:
    for _ in range(8):
        with scope("block"):
            x = x.exp().sin().tanh().cos()
    return x


def test_regions_inside_bound_the_memory_of_the_second_call():
    def peak(scope: Any) -> int:
        x = torch.linspace(-1, 1, 10_000, requires_grad=True)
        with StorageMeter() as meter:
            y = rerun(blocks, scope, x)
            meter.reset_peak()
            y.sum().backward()
            return meter.peak_bytes // x.nbytes

    # Eight inputs of blocks and one block, versus all that autograd saves.
    assert peak(CheckpointScope) < 15 < 20 <= peak(plain)


def test_the_first_call_holds_nothing_but_its_arguments():
    x = X.clone().requires_grad_()
    scopes: list[CheckpointScope] = []

    def scope(name: str) -> CheckpointScope:
        scopes.append(CheckpointScope(name, policy=KeepCostly()))
        return scopes[-1]

    assert saved_bytes(lambda: rerun(blocks, scope, x)) == x.nbytes
    assert sum(scope.memory_bytes for scope in scopes) == 0


# Dynamo itself looks at `.grad` of what a compiled function is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_what_is_compiled_runs_alike_in_both_calls():
    torch._dynamo.reset()
    inner = torch.compile(lambda t: (t * 2).exp().sin() * t, backend="aot_eager")

    def function(scope: Any, x: Tensor) -> Tensor:
        with scope("region"):
            return inner(x).tanh()

    found = gradient(lambda x: rerun(function, CheckpointScope, x), X)
    expected = gradient(lambda x: ((x * 2).exp().sin() * x).tanh(), X)
    torch._dynamo.reset()
    assert torch.equal(found, expected)


def test_a_module_inside_is_recomputed_too():
    layer = nn.Linear(12, 12, dtype=X.dtype)
    model = nn.Sequential(checkpoint_module(layer), nn.Tanh())
    expected = gradient(lambda x: layer(x).tanh(), X)
    assert torch.equal(gradient(lambda x: rerun(model, x), X), expected)


@pytest.fixture
def process_group() -> Iterator[None]:
    begin_fake_group()
    yield
    end_fake_group()


def paired(x: Tensor) -> Tensor:
    return Pair.apply(x, x * 2)


def sharded(x: Tensor) -> Tensor:
    return DTensor.from_local(x * 2, mesh_of_two(), [Replicate()], run_check=False)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", [paired, sharded])
def test_wrappers_are_compared_by_what_they_are_made_of(wrap):
    def gradients(call: Callable[..., Any], function: Callable[..., Any]) -> Any:
        x = X.clone().requires_grad_()
        out = call(function, wrap(x))
        return torch.autograd.grad(out, x, torch.ones_like(out))

    def steady(x: Tensor) -> Tensor:
        return ((x * 2).sin() * x).exp()

    def drifting(x: Tensor) -> Tensor:
        return ((x * (3 if is_recomputing() else 2)).sin() * x).exp()

    expected = gradients(lambda function, x: function(x), steady)
    assert torch.equal(*gradients(rerun, steady), *expected)
    with pytest.raises(MismatchError, match="did not give what forward computed"):
        gradients(rerun, drifting)


def test_a_step_that_is_traced_is_right_too():
    def nested(scope: Any, x: Tensor) -> Tensor:
        with scope("around"):
            return blocks(scope, x)

    def traced(x: Tensor) -> Tensor:
        return rerun(nested, CheckpointScope, x)

    expected = gradient(lambda x: nested(plain, x), X)
    with StorageMeter() as meter:
        tracer = StepTracer(meter, OperatorTimer("cpu"), reruns=False)
        tracer.attach()
        try:
            found = gradient(traced, X)
        finally:
            tracer.stop()
            tracer.detach()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("is_nested", [False, True])
def test_torch_never_takes_one_tensor_of_a_region_for_another(is_nested):
    # torch.utils.checkpoint finds tensors by their place. What a region holds depends
    # on what else is alive when it ends, which is not the same in both calls here.
    first, second = torch.randn(4), torch.randn(4)
    x = torch.randn(4, requires_grad=True)
    alive: list[Tensor] = []

    def function(x: Tensor, calls: list[None]) -> Tensor:
        with (
            CheckpointScope("outer", verify="off", enabled=is_nested),
            CheckpointScope("inner", verify="off"),
        ):
            y, z = x * first.exp(), x * second.exp()
            if calls:
                alive.append(z)
            del z
            calls.append(None)
        return y

    y = torch_checkpoint(function, x, [], use_reentrant=False)
    with pytest.raises(CheckpointError, match="different metadata"):
        y.sum().backward()

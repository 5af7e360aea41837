"""Tensors that are made of others are recorded by these, and rebuilt from them."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from recoup import CheckpointScope, KeepSmall, checkpoint_module
from recoup.backend.autograd.wrappers import inner_tensors
from recoup.errors import ChangedTensorError
from tests.support.counting import Operators
from tests.support.subclasses import LowRank, Silent
from tests.support.twin import Region, compare
from tests.support.wrapping import (
    Pair,
    Parts,
    begin_fake_group,
    end_fake_group,
    mesh_of_two,
)

always = functools.partial(CheckpointScope, verify="always")
OFFSETS = torch.tensor([0, 3, 7, 10])
REGIONS = [
    pytest.param(always, id="recompute"),
    pytest.param(functools.partial(always, policy=KeepSmall(10**9)), id="keep all"),
    pytest.param(functools.partial(always, use_recomputation=False), id="plain"),
    pytest.param(functools.partial(CheckpointScope, verify="full"), id="full"),
]


def jagged(values: Tensor) -> Any:
    return torch.nested.nested_tensor_from_jagged(
        values, OFFSETS, max_seqlen=4, min_seqlen=3
    )


def pointwise(x: Tensor, weight: Tensor) -> Tensor:
    return (jagged(x @ weight).exp().sin() * 2).values()


def layers(x: Tensor, weight: Tensor) -> Tensor:
    hidden = functional.gelu(functional.linear(jagged(x * 2), weight))
    return functional.linear(hidden, weight.T).values()


def written(x: Tensor, weight: Tensor) -> Tensor:
    y = jagged(x @ weight)
    y = functional.relu(y, inplace=True)
    return (y.values() @ weight).sin()


def attention(x: Tensor, weight: Tensor) -> Tensor:
    heads = jagged(x @ weight).unflatten(-1, [2, 2]).transpose(1, 2)
    found = functional.scaled_dot_product_attention(heads, heads, heads)
    return found.transpose(1, 2).flatten(-2).values().sin()


def lengths_of_its_own(x: Tensor, weight: Tensor) -> Tensor:
    lengths = torch.tensor([3, 4, 3])
    offsets = functional.pad(lengths.cumsum(0), (1, 0))
    y = torch.nested.nested_tensor_from_jagged(x @ weight, offsets)
    return (y.sin() * y.exp()).values()


JAGGED = [pointwise, layers, written, attention, lengths_of_its_own]


def around(body: Any, depth: int) -> Any:
    def step(region: Region) -> dict[str, Any]:
        weight = torch.randn(4, 4, requires_grad=True)
        x = torch.randn(10, 4, requires_grad=True)
        with contextlib.ExitStack() as stack:
            for level in range(depth):
                stack.enter_context(region(f"level {level}"))
            y = body(x, weight)
        loss = y.square().sum()
        first = torch.autograd.grad(loss, [x, weight], retain_graph=True)
        second = torch.autograd.grad(loss, [x, weight])
        return {"first": first, "second": second, "y": y}

    return step


@pytest.mark.filterwarnings("ignore::UserWarning")
class TestJagged:
    @pytest.mark.parametrize("depth", [1, 2, 3])
    @pytest.mark.parametrize("body", JAGGED)
    def test_a_jagged_tensor_is_bitwise_the_twins(self, body, depth):
        assert compare(around(body, depth), always) == []

    @pytest.mark.parametrize("region", REGIONS)
    @pytest.mark.parametrize("body", JAGGED)
    def test_it_is_so_whatever_is_kept(self, body, region):
        assert compare(around(body, 1), region) == []

    def test_a_write_on_some_steps_only_is_seen(self):
        def step(region: Region) -> dict[str, Any]:
            layer = nn.Linear(4, 4)
            found = []
            for turn in range(3):
                with region("block"):
                    y = jagged(layer(torch.randn(10, 4)))
                    if turn == 2:
                        y = functional.relu(y, inplace=True)
                    z = layer(y.values())
                parameters = list(layer.parameters())
                found.append(torch.autograd.grad(z.square().sum(), parameters))
            return {"gradients": found}

        assert compare(step, CheckpointScope) == []

    def test_what_it_saves_is_recomputed(self):
        weight = torch.randn(4, 4, requires_grad=True)
        scope = CheckpointScope("block", verify="off")
        with scope:
            y = layers(torch.randn(10, 4), weight)
        assert scope.kept_operators == {}
        # The input, the weight and the offsets, no activation.
        assert scope.memory_bytes <= 2 * 10 * 4 * 4 + 4 * 4 * 4 + 2 * OFFSETS.nbytes
        with Operators() as operators:
            y.sum().backward()
        assert operators.counts["linear"] + operators.counts["addmm"] > 0


class TestWrappers:
    def step(self, region: Region, depth: int = 1) -> dict[str, Any]:
        both = TwoTensor(torch.randn(4), torch.randn(4))
        weight = torch.randn(4, requires_grad=True)
        with contextlib.ExitStack() as stack:
            for level in range(depth):
                stack.enter_context(region(f"level {level}"))
            hidden: Any = both * weight + 1
            hidden.mul_(2)
            y = hidden.sin().exp()
        gradient: Any = torch.autograd.grad(y.sum(), weight)[0]
        return {"gradient": [gradient.a, gradient.b], "y": [y.a, y.b]}

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_a_write_inside_is_bitwise_the_twins(self, depth):
        assert compare(functools.partial(self.step, depth=depth), always) == []

    @pytest.mark.parametrize("region", REGIONS)
    def test_it_is_so_whatever_is_kept(self, region):
        assert compare(self.step, region) == []

    def test_its_operators_run_again_on_the_inner_tensors(self):
        weight = torch.randn(4, requires_grad=True)
        with CheckpointScope("block", verify="off"):
            y: Any = (TwoTensor(torch.ones(4), torch.ones(4)) * weight).exp().sin()
        with Operators() as operators:
            y.sum().backward()
        assert operators.counts["exp"] == 2

    def test_what_was_saved_before_a_write_is_what_backward_gets(self):
        def run(*, writes: bool) -> Any:
            weight = torch.ones(4, requires_grad=True)
            with CheckpointScope("block", verify="off"):
                y: Any = TwoTensor(torch.ones(4) * 2, torch.ones(4) * 3) * 2
                z: Any = y * weight  # saves y
                if writes:
                    y.mul_(5)
            gradient: Any = torch.autograd.grad(z.sum(), weight)[0]
            return gradient.a.tolist(), gradient.b.tolist()

        assert run(writes=True) == run(writes=False)

    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_write_between_forward_and_backward_is_an_error(self, depth):
        weight: Any = nn.Parameter(TwoTensor(torch.ones(4), torch.ones(4)))
        for written in (False, False, True):
            with contextlib.ExitStack() as stack:
                for level in range(depth):
                    stack.enter_context(CheckpointScope(f"level {level}"))
                y: Any = (weight * 2).exp().sin()
            if written:
                with torch.no_grad():
                    weight.mul_(2)
                with pytest.raises(ChangedTensorError, match="tensor of shape"):
                    y.sum().backward()
            else:
                y.sum().backward()

    def test_one_that_does_not_say_what_it_is_made_of_is_kept_and_counted(self):
        x = torch.randn(4, requires_grad=True)
        scope = CheckpointScope("block", verify="off")
        with scope:
            y: Any = (Silent(x.detach() * 2) * 3).exp()
            z = x.exp().sin()
        assert scope.kept_operators == {"aten.mul.Tensor": 1, "aten.exp.default": 1}
        with Operators() as operators:
            z.sum().backward()
        assert operators.counts["exp"] == 1
        del y


def to_local(tensor: Any) -> Tensor:
    return tensor.to_local()


def to_full(tensor: Any) -> Tensor:
    return tensor.full_tensor()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("unwrap", [to_local, to_full])
@pytest.mark.parametrize("kind", ["parameter", "frozen", "computed"])
class TestLocalTensors:
    """A region reads the local tensor of a DTensor, which counts no writes to it."""

    @pytest.fixture(autouse=True)
    def process_group(self) -> Iterator[None]:
        begin_fake_group()
        yield
        end_fake_group()

    def whole(self, kind: str) -> Any:
        values = torch.linspace(-1, 2, 4)
        # Replicated: then `full_tensor` copies nothing.
        whole = DTensor.from_local(values, mesh_of_two(), [Replicate()])
        if kind == "computed":
            return whole.requires_grad_() * 1.5
        return nn.Parameter(whole, requires_grad=kind == "parameter")

    def step(
        self, region: Region, kind: str, unwrap: Any, depth: int, writes: str = ""
    ) -> dict[str, Any]:
        x = torch.linspace(-1, 1, 4, requires_grad=True)
        whole = self.whole(kind)
        with contextlib.ExitStack() as stack:
            for level in range(depth):
                stack.enter_context(region(f"block {level}", verify="off"))
            # Plain autograd does not save the local tensor itself.
            y = (x * (unwrap(whole) * 2)).sin()
            if writes == "inside":
                with torch.no_grad():
                    whole.mul_(2)
        if writes == "after":
            with torch.no_grad():
                whole.mul_(2)
        y.sum().backward()
        if writes == "later":
            with torch.no_grad():
                whole.mul_(2)
        return {"gradient": x.grad, "whole": whole.detach().to_local()}

    def test_a_write_to_it_after_the_region_is_an_error(self, kind, unwrap, depth):
        with pytest.raises(ChangedTensorError, match="changed in place"):
            self.step(CheckpointScope, kind, unwrap, depth, writes="after")

    @pytest.mark.parametrize("writes", ["", "inside", "later"])
    def test_anything_else_is_bitwise_the_twins(self, kind, unwrap, depth, writes):
        def step(region: Region) -> dict[str, Any]:
            return self.step(region, kind, unwrap, depth, writes)

        assert compare(step, CheckpointScope) == []


@pytest.mark.parametrize("kind", ["distributed", "jagged", "pair"])
def test_a_region_on_wrappers_inside_torchs_checkpoint_is_bitwise_the_twins(kind):
    def step(region: Region) -> dict[str, Any]:
        x: Any = torch.randn(10, 4, requires_grad=True)
        weight: Any = torch.randn(4, 4, requires_grad=True)
        if kind == "distributed":
            mesh = mesh_of_two()
            weight = nn.Parameter(DTensor.from_local(weight.detach(), mesh))
        elif kind == "pair":
            weight = TwoTensor(weight.detach(), weight.detach() * 2).requires_grad_()

        def block(x: Any) -> Tensor:
            with region("block"):
                if kind == "jagged":
                    return layers(x, weight)
                if kind == "pair":
                    x = Pair.apply(x, x * 2)
                    found = Parts.apply(torch.tanh(torch.tanh(x @ weight) @ weight))
                    return found[0] + found[1]
                x = DTensor.from_local(x, mesh_of_two())
                y: Any = torch.tanh(torch.tanh(x @ weight) @ weight)
                return y.to_local()

        y = torch_checkpoint(block, x, use_reentrant=False)
        assert isinstance(y, Tensor)
        found = torch.autograd.grad(y.square().sum(), [x, weight])
        return {"gradients": [*found[:1], *inner_tensors(found[1])]}

    begin_fake_group()
    try:
        assert compare(step, CheckpointScope) == []
    finally:
        end_fake_group()


def wrapped(kind: str, x: Tensor) -> Any:
    if kind == "pair":
        return Pair.apply(x, x * 2)
    return DTensor.from_local(x * 2, mesh_of_two(), [Replicate()], run_check=False)


def write_to_a_wrapper_around_regions(
    region: Region, kind: str, depth: int, place: str
) -> dict[str, Any]:
    """Write to a wrapper that regions inside have read, within the region or after."""
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    with contextlib.ExitStack() as outer:
        outer.enter_context(region("outer"))
        if place != "own":
            outer.close()  # the wrapper is from outside of all regions
        tensor = wrapped(kind, x)
        if place != "own":
            outer.enter_context(region("outer"))
        with contextlib.ExitStack() as inner:
            for number in range(depth):
                inner.enter_context(region(f"inner {number}"))
            y = (tensor + 1).sin()
        if place == "after":
            outer.close()
        tensor.mul_(0.5)
        z = y + tensor.tanh()
    parts: Any = [z.to_local()] if isinstance(z, DTensor) else Parts.apply(z)
    local = torch.stack(tuple(parts)).sum(0)
    (found,) = torch.autograd.grad(local.sum(), x)
    return {"gradient": found, "local": local}


@pytest.mark.parametrize("kind", ["pair", "sharded"])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("place", ["own", "outside"])
def test_regions_inside_leave_writes_to_a_wrapper_to_the_region_around(
    kind, depth, place
):
    step = functools.partial(
        write_to_a_wrapper_around_regions, kind=kind, depth=depth, place=place
    )
    begin_fake_group()
    try:
        for region in (CheckpointScope, always):
            assert compare(step, region) == []
    finally:
        end_fake_group()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("kind", ["pair", "sharded"])
def test_a_write_to_a_wrapper_after_all_regions_is_an_error(kind, depth):
    begin_fake_group()
    try:
        with pytest.raises(ChangedTensorError):
            write_to_a_wrapper_around_regions(always, kind, depth, "after")
    finally:
        end_fake_group()


class TestQuantized:
    def step(self, region: Region, modules: bool = False) -> dict[str, Any]:  # noqa: FBT001, FBT002
        net = nn.Sequential(LowRank(8), nn.GELU(), LowRank(8), nn.Tanh())
        x = torch.randn(6, 8, requires_grad=True)
        with region("outer"), region("inner"):
            y = net(x)
        y.square().sum().backward()
        trained = [p.grad for p in net.parameters() if p.requires_grad]
        return {"gradients": [x.grad, *trained], "y": y}

    def test_low_rank_layers_on_quantized_weights_are_bitwise_the_twins(self):
        assert compare(self.step, always) == []

    def test_a_module_of_such_layers_is_bitwise_the_twin(self):
        def gradients(*, checkpointed: bool) -> list[Tensor]:
            torch.manual_seed(0)
            net = nn.Sequential(LowRank(8), nn.GELU(), LowRank(8))
            x = torch.randn(6, 8)
            if checkpointed:
                checkpoint_module(net)
            for _ in range(2):
                net.zero_grad()
                net(x).square().sum().backward()
            return [p.grad for p in net.parameters() if p.grad is not None]

        pairs = zip(
            gradients(checkpointed=True), gradients(checkpointed=False), strict=True
        )
        assert all(torch.equal(*pair) for pair in pairs)

"""Operators are judged by what they do, whatever their schemas say."""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from recoup import CheckpointScope
from recoup.backend.operators.kernels import KERNELS, kernel_of
from tests.support.counting import Operators
from tests.support.twin import Region, compare, plain

_numbers = itertools.count()

unverified = functools.partial(CheckpointScope, verify="off")
verified = functools.partial(CheckpointScope, verify="always")


@pytest.fixture
def library() -> Iterator[Any]:
    """A library of operators that nobody knows, with a name of its own."""
    name = f"recoup_undeclared_{next(_numbers)}"
    with torch.library._scoped_library(name, "FRAGMENT") as made:
        made.define("double(Tensor x) -> Tensor")
        made.define("change(Tensor x, float by) -> Tensor")
        made.define("fill(Tensor[] into, *, Tensor source) -> ()")
        made.define("honest(Tensor(a!) x) -> ()")
        made.define("noisy(Tensor x, float rate) -> Tensor")
        made.define("noisy_(Tensor(a!) x, float rate) -> ()")
        made.define("noisy_at(Tensor place, Tensor[] x) -> Tensor")
        made.impl("double", lambda x: x * 2, "CPU")
        made.impl("change", change, "CPU")
        made.impl("fill", fill, "CPU")
        made.impl("honest", honest, "CPU")
        for key in ("CPU", "CUDA"):
            made.impl("noisy", noisy, key)
            made.impl("noisy_at", lambda _, x: x[0] + torch.rand_like(x[0]), key)
        made.impl("noisy_", noisy_, "CPU")
        yield getattr(torch.ops, name)


def change(x: Tensor, by: float) -> Tensor:
    """Write to the argument, as a compiled kernel does: no version counts it."""
    x.data.mul_(by)
    return x + 1


def honest(x: Tensor) -> None:
    x.mul_(3)


def add(x: Tensor, y: Tensor) -> None:
    x.add_(y.clone()).mul_(2)


def noisy(x: Tensor, rate: float) -> Tensor:
    """Draw, as kernels of other libraries do: no tag of the schema tells."""
    return x + torch.rand_like(x) + torch.rand(()).item() if rate > 0 else x * 2


def noisy_(x: Tensor, rate: float) -> None:
    if rate > 0:
        x.add_(torch.rand_like(x))


def fill(into: list[Tensor], *, source: Tensor) -> None:
    for place, target in enumerate(into):
        target.data.copy_(source * (place + 1))


def own_value(ops: Any, x: Tensor, outside: Tensor) -> Tensor:
    with torch.no_grad():
        y = x.exp()
        ops.change(y, 0.5)
    return (x * y).sin() * y.cos()


def saved_before(ops: Any, x: Tensor, outside: Tensor) -> Tensor:
    with torch.no_grad():
        y = x.exp()
    z = x * y  # saves y, and shows backward what the operator left there
    with torch.no_grad():
        ops.change(y, 0.5)
    return z.sin() * (x * y).cos()


def outside_value(ops: Any, x: Tensor, outside: Tensor) -> Tensor:
    with torch.no_grad():
        before = outside.exp()
        result = ops.change(outside, 0.5)
    return (x * before).sin() * (x * outside.exp()).cos() * result.tanh() * x


def result_and_argument(ops: Any, x: Tensor, outside: Tensor) -> Tensor:
    with torch.no_grad():
        y = (x * 2).exp()
        z = ops.change(y, 0.25).exp()
    return (x * z.sin()).exp() * y.cos() * (x * y).tanh()


def in_a_list(ops: Any, x: Tensor, outside: Tensor) -> Tensor:
    with torch.no_grad():
        into = [torch.zeros(4, 4), torch.zeros(4, 4), outside]
        ops.fill(into, source=x.exp())
    return (x * into[0]).sin() + (x * into[1].exp()).cos() * (x * outside).tanh()


def part_of_a_value(ops: Any, x: Tensor, outside: Tensor) -> Tensor:
    with torch.no_grad():
        y = x.exp()
        ops.change(y[1:3], 0.5)
    return (x * y).sin() * y.T.cos()


BODIES = [
    own_value,
    saved_before,
    outside_value,
    result_and_argument,
    in_a_list,
    part_of_a_value,
]


def step_with(ops: Any, body: Any, depth: int, times: int) -> Any:
    def step(region: Region) -> dict[str, Any]:
        x = torch.randn(4, 4, requires_grad=True)
        outside = torch.randn(4, 4)
        found = []
        for _ in range(times):
            with region("outer") if depth == 2 else plain(), region("inner"):
                y = body(ops, x * 1, outside)
            found.append(torch.autograd.grad(y.sum(), x))
        return {"gradients": found, "outside": outside}

    return step


class TestWrites:
    @pytest.mark.parametrize("region", [unverified, verified])
    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize("body", BODIES)
    def test_a_write_that_no_schema_declares_is_bitwise_the_twins(
        self, library, body, depth, region
    ):
        # The twin runs first and outside of any region: the first call that a region
        # sees is the one that finds the writes.
        assert compare(step_with(library, body, depth, times=3), region) == []

    def test_an_operator_that_writes_nothing_is_looked_at_once(self, library):
        x = torch.randn(4, 4, requires_grad=True)
        kernel = kernel_of(library.double.default)
        assert kernel.is_unproven
        assert not kernel.simple
        for _ in range(2):
            with unverified("block"):
                library.double(x.detach())
        assert (kernel.is_unproven, kernel.facts.writes) == (False, ())

    def test_an_operator_that_writes_nothing_is_recomputed_even_at_first_sight(
        self, library
    ):
        x = torch.randn(4, 4, requires_grad=True)
        with unverified("block"):
            y = (x * library.double(x.detach()).exp()).sin()
        with Operators() as operators:
            y.sum().backward()
        assert [name for name in operators.names if "double" in name] != []

    @pytest.mark.parametrize("region", [unverified, verified])
    def test_an_argument_that_lies_where_it_declares_to_write(self, library, region):
        made = torch.library.Library(library.name, "FRAGMENT")
        made.define("add(Tensor(a!) x, Tensor y) -> ()")
        made.impl("add", add, "CPU")

        def step(region: Region) -> dict[str, Any]:
            x = torch.randn(4, 4, requires_grad=True)
            with region("block"):
                y = x.detach().exp()
                z = y.sin() * x
                library.add(y, y[:1].expand(4, 4))
                library.add(y, y[:, :1].expand(4, 4))
                w = (x * y).sin() * z
            w.sum().backward()
            return {"gradient": x.grad, "y": y}

        assert compare(step, region) == []
        kernel = kernel_of(library.add.default)
        assert (kernel.facts.writes, kernel.is_unproven) == ((0,), True)
        with unverified("block"):
            library.add(torch.ones(2), torch.ones(1).expand(2))
        assert (kernel.facts.writes, kernel.is_unproven) == ((0,), False)

    @pytest.mark.parametrize("region", [unverified, verified])
    def test_an_expanded_argument_that_it_writes_to(self, library, region):
        made = torch.library.Library(library.name, "FRAGMENT")
        made.define("first(Tensor x) -> Tensor")
        made.impl("first", lambda x: x[:1].data.mul_(2) + 1, "CPU")

        def step(region: Region) -> dict[str, Any]:
            x = torch.randn(4, 4, requires_grad=True)
            with region("block"):
                y = x.detach().exp()[:1]
                z = y.sin() * x
                found = library.first(y.expand(4, 4))
                w = (x * y).sin() * z * found
            w.sum().backward()
            return {"gradient": x.grad, "y": y}

        assert compare(step, region) == []

    def test_what_it_writes_to_is_known_from_then_on(self, library):
        with unverified("block"):
            library.change(torch.ones(2, requires_grad=True).detach() * 1, 2.0)
            library.fill([torch.ones(2)], source=torch.ones(2) * 2)
            library.honest(torch.ones(2))
        assert kernel_of(library.change.default).facts.writes == (0,)
        assert kernel_of(library.fill.default).facts.writes == (0,)
        assert kernel_of(library.honest.default).facts.writes == (0,)

    def test_nothing_is_found_out_where_tensors_have_no_contents(self, library):
        made = torch.library.Library(library.name, "FRAGMENT")
        made.impl("double", lambda x: x * 2, "Meta")
        with unverified("block"):
            library.double(torch.ones(2, device="meta"))
        assert kernel_of(library.double.default).is_unproven

    def test_torchs_own_operators_are_not_looked_at(self):
        with unverified("block"):
            torch.ones(2).add_(1).exp()
        of_torch = [k for k in KERNELS.values() if k.facts.name.startswith("aten.")]
        assert of_torch
        assert not any(kernel.is_unproven for kernel in of_torch)


class TestDraws:
    @pytest.mark.parametrize("region", [unverified, verified])
    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize("rates", [(0.5, 0.5), (0.0, 0.0, 0.5, 0.5), (0.5, 0.0)])
    def test_a_draw_that_no_schema_declares_is_bitwise_the_twins(
        self, library, region, depth, rates
    ):
        def step(region: Region) -> dict[str, Any]:
            x = torch.randn(4, 4, requires_grad=True)
            found = []
            for rate in rates:
                with region("outer") if depth == 2 else plain(), region("inner"):
                    noise = library.noisy(x.detach(), rate)
                    more = x.detach() * 2
                    library.noisy_(more, rate)
                    y = (x * noise).sin() * (x * more.exp()).cos()
                found.append(torch.autograd.grad(y.sum(), x))
            return {"gradients": found}

        assert compare(step, region) == []

    @pytest.mark.cuda
    def test_draws_from_two_generators_are_kept(self, library):
        x = torch.randn(4, 4, device="cuda", requires_grad=True)
        scope = unverified("block")
        with scope:
            noise = library.noisy(x.detach(), 0.5)
            y = (x * noise).sin()
        (found,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(found, noise * (x * noise).cos())
        assert sum(scope.kept_operators.values()) == 1


class TestSignature:
    def test_an_operator_that_is_not_replayed_makes_a_region_due_when_it_is_new(self):
        x = torch.randn(8, requires_grad=True)

        def step(*, chooses: bool) -> int:
            with CheckpointScope("due"):
                y = (x.exp() * 2).sin()
                if chooses:
                    y.detach().exp().multinomial(2, replacement=True)
            with Operators() as operators:
                y.sum().backward()
            return operators.counts["_local_scalar_dense"]

        steps = [False, False, True, False, True, True]
        reads = [step(chooses=chooses) for chooses in steps]
        assert [read > 0 for read in reads] == [True, False, False, True, True, False]


@pytest.mark.cuda
def test_draws_on_the_device_of_any_argument_are_repeated(library):
    device = torch.accelerator.current_accelerator()

    def step(region: Region) -> dict[str, Any]:
        torch.manual_seed(0)
        x = torch.randn(64, device=device, requires_grad=True)
        with region("block"):
            y = library.noisy_at(torch.zeros(()), [x.detach().exp()]).sin() * x
        y.sum().backward()
        return {"x": x.grad, "y": y}

    assert compare(step, unverified) == []


@torch.library.custom_op("recoup_counted::twice_", mutates_args={"x", "view"})
def counted_write(x: Tensor, view: Tensor, other: Tensor) -> None:
    """Write to an argument, whose version torch's wrapper has incremented before."""
    x.mul_(2).add_(other)
    view.add_(1)


@torch.library.custom_op("recoup_counted::made_", mutates_args={"x"})
def counted_write_and_result(x: Tensor, other: Tensor) -> Tensor:
    """Do the same, and return a result that can be recomputed."""
    return x.mul_(2).add_(other).exp()


@pytest.mark.parametrize("region", [unverified, verified])
@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("makes", [False, True])
def test_custom_operators_count_their_writes_before_they_run(
    region, is_own, depth, makes
):
    """A region inside has read the tensor: it is no write that nobody counts."""

    def step(make_region: Region) -> dict[str, Any]:
        torch.manual_seed(0)
        x = torch.randn(4, 4, requires_grad=True)
        tensor, other = torch.randn(4, 4), torch.randn(4, 4)
        with make_region("outer"), contextlib.ExitStack() as around:
            if is_own:
                tensor = tensor.exp()
            with contextlib.ExitStack() as inside:
                for number in range(depth):
                    inside.enter_context(make_region(f"inner {number}"))
                y = (x * tensor.sigmoid()).sin()
            around.enter_context(torch.no_grad())
            made = other
            if makes:
                made = counted_write_and_result(tensor, other)
            else:
                counted_write(tensor, tensor[:2], other)
            around.close()
            z = (y * tensor.exp()).cos() * made
        z.sum().backward()
        return {"x": x.grad, "tensor": tensor}

    assert compare(step, region) == []

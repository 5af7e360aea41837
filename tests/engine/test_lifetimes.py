"""Every tensor dies by its reference count at the moment nobody needs it.

The garbage collector is off in all tests.
"""

import contextlib
import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor

from recoup import CheckpointGroup, CheckpointScope, checkpoint, keep, rerun
from recoup.backend.memory.meters import StorageMeter
from recoup.backend.operators.fingerprints import fingerprint
from recoup.errors import ChangedTensorError, MismatchError
from tests.support.counting import Alive, Operators
from tests.support.drawn_programs import PHASES, programs
from tests.support.models import PROBLEMS
from tests.support.programs import Machine, Program, repaired
from tests.support.twin import plain

unverified = functools.partial(CheckpointScope, verify="off")
LENGTH, DOUBLE = 1000, 8
SIZE_BYTES = LENGTH * DOUBLE
SCALAR_BYTES = DOUBLE


def vector() -> Tensor:
    return torch.randn(LENGTH, dtype=torch.float64, requires_grad=True)


def three(x: Tensor) -> Tensor:
    """Save the input and two tensors between."""
    return x.sin().sin().sin()


def test_the_collector_is_off():
    assert not gc.isenabled()


def test_what_autograd_saves_in_a_scope_is_dead_before_the_scope_ends():
    x = vector()
    with Alive() as alive, unverified("block"):
        y = three(three(x))
        assert alive.sizes == [y.nbytes]


def test_with_verification_a_fingerprint_is_alive_for_each_value_saved():
    x = vector()
    with Alive() as alive:
        with CheckpointScope("block", verify="always"):
            y = three(x)
        each = fingerprint(y).nbytes
        # The second and the third sine save what is inside the region.
        assert alive.sizes == [each, each, y.nbytes]


def test_a_graph_dropped_without_backward_frees_everything():
    x = vector()
    with Alive() as alive:
        with unverified("outer"):
            y = three(x)
            with unverified("inner"):
                z = three(y)
            z = three(z)
        del y, z
        assert alive.sizes == []


@pytest.mark.parametrize("options", [{}, {"verify": "always"}, {"cache": True}])
def test_after_backward_only_the_gradient_is_left(options):
    x = vector()
    with Alive() as alive:
        with CheckpointScope("outer", **options):
            y = three(x)
            with CheckpointScope("inner", **options):
                y = three(y)
        y.sum().backward()
        del y
        assert alive.sizes == [SIZE_BYTES]
        x.grad = None
        assert alive.sizes == []


def test_a_region_dies_with_its_graph():
    scope = CheckpointScope("block")
    with scope:
        y = three(vector())
    region = weakref.ref(scope.nodes[0].region)
    assert region() is not None
    del y
    assert region() is None
    assert scope.nodes == []


def test_a_region_dies_after_its_backward():
    scope = CheckpointScope("block")
    x = vector()
    with scope:
        y = three(x)
    region = weakref.ref(scope.nodes[0].region)
    y.sum().backward()
    assert region() is None


def test_a_buffer_that_is_saved_and_then_joins_the_graph_makes_no_cycle():
    # A cycle through autograd's nodes is one that not even the collector finds.
    x, scope = vector(), unverified("block")
    buffer = torch.randn(LENGTH, dtype=torch.float64)
    with scope:
        y = (buffer * x).sin()
        buffer.mul_(x.exp())
    region = weakref.ref(scope.nodes[0].region)
    del y, buffer
    assert region() is None


def test_a_buffer_that_is_transposed_and_joins_the_graph_later_makes_no_cycle():
    x, scope = vector(), unverified("block")
    buffer = torch.randn(LENGTH, dtype=torch.float64)
    with scope:
        y = (buffer.exp() * x).sin()
        buffer.view(1, LENGTH).t_()
    region = weakref.ref(scope.nodes[0].region)
    buffer.mul_(y)
    del y, buffer
    assert region() is None


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_nested_regions_hold_only_what_came_into_the_outermost(depth):
    x = vector()
    with Alive() as alive:
        y = nested(x, depth)
        assert alive.sizes == [y.nbytes]


def nested(x: Tensor, depth: int) -> Tensor:
    with unverified(f"depth {depth}"):
        x = three(x)
        return three(nested(x, depth - 1)) if depth > 1 else x


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_the_peak_of_backward_is_the_boundaries_and_one_region(blocks):
    x = vector()
    with StorageMeter() as meter:
        y = x
        for number in range(blocks):
            with unverified(f"block {number}"):
                y = three(y)
        loss = y.sum()
        del y
        boundaries = (blocks - 1) * SIZE_BYTES  # x itself was there before
        assert meter.live_bytes == boundaries + SCALAR_BYTES
        meter.reset_peak()
        loss.backward()
    # The last block, when its first operator is differentiated: two values replayed,
    # a cosine, and its product with the gradient, which is one number expanded. The
    # blocks before have one boundary less and a gradient of full size instead.
    region = 2 * SIZE_BYTES
    workspace = 2 * SIZE_BYTES
    scalars = 2 * SCALAR_BYTES  # the loss and its gradient
    assert meter.peak_bytes == boundaries + region + workspace + scalars


def test_the_plain_peak_is_larger_by_what_the_regions_forgot():
    blocks = 5
    x = vector()
    peaks = {}
    for region in (plain, unverified):
        with StorageMeter() as meter:
            y = x
            for number in range(blocks):
                with region(f"block {number}"):
                    y = three(y)
            loss = y.sum()
            del y
            loss.backward()
            x.grad = None
        peaks[region] = meter.peak_bytes
    assert peaks[plain] - peaks[unverified] == 2 * (blocks - 1) * SIZE_BYTES


def test_a_replay_frees_every_value_at_its_last_use():
    x = vector()
    with StorageMeter() as meter:
        with unverified("long"):
            # Adding a number saves nothing: a replay needs two of these at a time.
            y = x
            for _ in range(20):
                y = y + 1
            z = y.sin()
        del y
        loss = z.sum()
        del z
        meter.reset_peak()
        loss.backward()
    # The sine's input, its cosine and the product with the gradient.
    assert meter.peak_bytes == 3 * SIZE_BYTES + 2 * SCALAR_BYTES


def test_recursive_halving_holds_a_logarithm_of_the_chain():
    x = vector()
    with StorageMeter() as meter:
        loss = halved(x, 32).sum()
        assert meter.live_bytes == SCALAR_BYTES
        meter.reset_peak()
        loss.backward()
    # One boundary a level (5), the gradient, a cosine, a product, and one that a
    # region replays while it hands over what it holds.
    assert meter.peak_bytes <= (5 + 4) * SIZE_BYTES + 2 * SCALAR_BYTES


def halved(x: Tensor, length: int) -> Tensor:
    if length == 1:
        return x.sin()
    with unverified(f"length {length}"):
        return halved(halved(x, length // 2), length // 2)


def test_two_backwards_replay_twice_and_leave_nothing():
    x = vector()
    with Alive() as alive:
        with unverified("block"):
            y = three(x)
        for _ in range(2):
            (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            del gradient
            assert alive.sizes == [y.nbytes]


def test_a_cache_replays_once_and_is_freed_with_the_graph():
    x = vector()
    scope = unverified("cached", cache=True)
    with Alive() as alive:
        with scope:
            y = three(x)
        region = scope.nodes[0].region
        assert region is not None
        for _ in range(3):
            torch.autograd.grad(y.sum(), x, retain_graph=True)
            assert alive.sizes == [SIZE_BYTES] * 3  # y and the two values recomputed
        assert region.replays == 1
        del region, y
        assert alive.sizes == []


def test_a_backward_of_a_part_leaves_nothing_of_the_rest():
    x = vector()
    with Alive() as alive:
        with unverified("two ends"):
            shared = x.sin()
            a, b = three(shared), three(shared)
        del shared
        torch.autograd.grad(a.sum(), x, retain_graph=True)
        assert alive.sizes == [SIZE_BYTES] * 2
        b.sum().backward()
        del a, b
        x.grad = None
        assert alive.sizes == []


def three_ends(x: Tensor) -> tuple[Tensor, ...]:
    with unverified("inside"):
        first = three(x)
    return first, three(x), x.exp()


def called_again(x: Tensor) -> tuple[Tensor, ...]:
    return rerun(three_ends, x)


@pytest.mark.parametrize("function", [three_ends, called_again])
def test_a_backward_of_a_part_leaves_nothing_of_the_second_call(function):
    x = vector()
    with Alive() as alive:
        ends = rerun(function, x)
        ends[-1].sum().backward()
        # The outputs and a gradient: nobody asked for the rest of the second call.
        assert alive.sizes.count(SIZE_BYTES) == 4
        del ends
        x.grad = None
        assert alive.sizes == []


def test_a_tensor_asked_for_outside_a_backward_leaves_nothing_of_the_second_call():
    x = vector()
    with Alive() as alive:
        ends = rerun(three_ends, x)
        node: Any = ends[-1].grad_fn
        assert torch.equal(node._saved_result, ends[-1])
        assert alive.sizes.count(SIZE_BYTES) == 3
        del ends, node
        assert alive.sizes == []


def test_dropping_one_of_two_outputs_before_backward_recomputes_less():
    x = vector()
    with unverified("two ends"):
        a, b = x.sin().cos(), x.tan().atan()
    del b
    with Operators() as operators:
        a.sum().backward()
    assert operators.counts["tan"] == 0


def test_a_failed_backward_leaves_nothing_once_the_graph_is_dropped():
    x = vector()

    def fail(gradient: Tensor) -> None:
        raise KeyError("on purpose")

    with Alive() as alive:
        with unverified("block"):
            y = x.sin()
            y.register_hook(fail)
            y = three(y)
        with pytest.raises(KeyError):
            y.sum().backward()
        del y
        assert alive.sizes == []


def test_a_failed_backward_leaves_nothing_recomputed_in_the_region():
    x = vector()

    def fail(gradient: Tensor) -> None:
        raise KeyError("on purpose")

    with Alive() as alive:
        with unverified("block"):
            y = x.sin()
            y.register_hook(fail)
            y = three(y)
        with pytest.raises(KeyError):
            y.sum().backward(retain_graph=True)
        assert alive.sizes == [SIZE_BYTES]


def test_an_exception_in_a_region_frees_everything():
    x = vector()
    with Alive() as alive:
        with contextlib.suppress(KeyError), unverified("block"):
            three(x)
            raise KeyError("on purpose")
        assert alive.sizes == []


def test_a_kept_tensor_lives_until_backward_needs_it_no_more():
    x = vector()
    with Alive() as alive:
        with unverified("block"):
            y = keep(x.sin()).cos().sin()
        assert alive.sizes == [SIZE_BYTES] * 2
        y.sum().backward()
        del y
        x.grad = None
        assert alive.sizes == []


def test_an_outside_tensor_is_let_go_after_backward():
    x = vector()
    with Alive() as alive:
        with unverified("block"):
            y = three(x * 2)
        h = y * 3
        with unverified("next"):
            z = three(h)
        del h
        assert SIZE_BYTES in alive.sizes
        z.sum().backward()
        del y, z
        x.grad = None
        assert alive.sizes == []


def test_an_outside_tensor_that_no_replay_needs_is_not_held():
    x = vector()
    with Alive() as alive:
        big = torch.ones(LENGTH, dtype=torch.float64)
        with unverified("block"):
            y = x + big  # Adding saves nothing.
            z = y.sin().cos()
        # The sum is replayed from both its terms.
        assert alive.sizes == [SIZE_BYTES] * 3
        del y, z
        with unverified("block"):
            total = (x + big).sum()
        del big
        assert alive.sizes == [total.nbytes]


def test_a_group_frees_its_region_with_the_graph():
    x = vector()
    group = CheckpointGroup()
    with Alive() as alive:
        for _ in range(3):
            y = group.checkpoint_fn(x, three)
            z = group.checkpoint_fn(y, three)
            z.sum().backward()
            del y, z
        x.grad = None
        assert alive.total_bytes < SIZE_BYTES


def test_a_closure_given_to_checkpoint_dies_after_the_call():
    x = vector()
    closures = [lambda t: three(t) + 1]
    alive = weakref.ref(closures[0])
    y = checkpoint(closures.pop(), x)
    assert alive() is None
    y.sum().backward()


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_model_trained_under_scopes_leaves_only_its_gradients(name):
    problem = PROBLEMS[name]
    model, inputs = problem.model(), problem.inputs()
    with Alive() as alive:
        for _ in range(2):
            model.zero_grad()
            model(inputs, CheckpointScope).square().mean().backward()
        model.zero_grad()
        left = alive.total_bytes
    with Alive() as alive:
        for _ in range(2):
            model.zero_grad()
            model(inputs, plain).square().mean().backward()
        model.zero_grad()
        assert left == alive.total_bytes


def forget(error: BaseException | None) -> None:
    """Let go of the frames that an exception was raised in, and those before it."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def left_alive(program: Program, region: Any, left_out: frozenset[int]) -> list[int]:
    torch.manual_seed(0)
    with Alive() as alive:
        machine = Machine(program, region, left_out)
        try:
            machine.run()
        # The second one where a foreach operator wrote to what a region had used: under
        # a dispatch mode, as the one that counts here, that gives no new version.
        except (ChangedTensorError, MismatchError) as error:
            forget(error)
            # PyTorch keeps the gradients of a failed backward until the next one.
            torch.ones((), requires_grad=True).backward()
        del machine
        return alive.sizes


@settings(max_examples=60, phases=PHASES)
@given(program=programs)
def test_a_random_program_leaves_nothing_alive(program):
    left_out, _ = repaired(program)
    # A tensor that is saved and then written to is a cycle in plain PyTorch already.
    assume(left_alive(program, plain, left_out) == [])
    assert left_alive(program, CheckpointScope, left_out) == []

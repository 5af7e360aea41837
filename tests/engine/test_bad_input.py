"""Bad input: one clear error each, and nothing left behind."""

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from recoup import (
    CheckpointGroup,
    CheckpointScope,
    checkpoint,
    checkpoint_module,
    keep,
    recompute,
)
from recoup.checkpointing import (
    adaptive_checkpoint,
    checkpoint_segment,
    unmark_checkpoint,
)
from recoup.engine.recording.active import open_regions
from recoup.errors import ChangedTensorError, ClearedError, MismatchError, UsageError
from tests.support.twin import leftovers


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    assert list(leftovers()) == []
    assert not open_regions()


def leaf() -> Tensor:
    return torch.randn(3, requires_grad=True)


@pytest.mark.parametrize("name", ["", "   ", "\n", None, 3, b"layer"])
def test_a_scope_without_a_name_is_refused(name):
    with pytest.raises(UsageError, match="expected a name for the scope") as caught:
        CheckpointScope(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["", " ", None])
def test_a_group_without_a_name_is_refused(name):
    with pytest.raises(UsageError, match="expected a name for the group"):
        CheckpointGroup(name)


def test_a_name_cannot_be_changed():
    scope = CheckpointScope("layer1")
    with pytest.raises(AttributeError):
        scope.name = "layer2"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("threshold", [-1, 1.5, "1 KiB", True, None])
def test_a_threshold_that_is_no_number_of_bytes_is_refused(threshold):
    with (
        CheckpointScope("block"),
        pytest.raises(UsageError, match="threshold in bytes"),
    ):
        adaptive_checkpoint(leaf().exp(), threshold)


@pytest.mark.parametrize("function", [keep, unmark_checkpoint, recompute])
@pytest.mark.parametrize("given", [None, 1.0, [torch.ones(1)], "tensor"])
def test_a_mark_on_no_tensor_is_refused(function, given):
    with pytest.raises(UsageError, match="expected a tensor, got"):
        function(given)


def test_checkpoint_of_a_tensor_with_more_arguments_is_refused():
    with pytest.raises(UsageError, match="the tensor alone"):
        checkpoint(leaf().exp(), 3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("inputs", [leaf(), 3, {"a": leaf()}, [leaf(), 3], None])
def test_a_segment_of_anything_but_tensors_is_refused(inputs):
    with pytest.raises(UsageError, match=r"expected (a list or tuple of )?tensors"):
        checkpoint_segment(inputs, lambda given: given[0])


@pytest.mark.parametrize("function", [None, 3, "function"])
def test_what_cannot_be_called_is_refused(function):
    with pytest.raises(UsageError):
        checkpoint_segment([leaf()], function)
    with pytest.raises(UsageError):
        CheckpointGroup().checkpoint_fn(leaf(), function)
    with pytest.raises(UsageError):
        checkpoint(function)


ARITIES = {
    "checkpoint_fn_flex": 1,
    "checkpoint_fn_flex2": 2,
    "checkpoint_fn_flex3": 3,
}


@pytest.mark.parametrize("method", ARITIES)
@pytest.mark.parametrize("returned", [0, 1, 2, 3, 4])
def test_a_group_function_returns_as_many_tensors_as_the_method_says(method, returned):
    call = getattr(CheckpointGroup(), method)

    def function(inputs: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(inputs[0].exp() for _ in range(returned))

    if returned == ARITIES[method]:
        call([leaf()], function)
    else:
        with pytest.raises(UsageError, match=f"must return {ARITIES[method]}"):
            call([leaf()], function)


def test_a_module_is_checkpointed_once():
    layer = checkpoint_module(torch.nn.Linear(3, 3))
    with pytest.raises(UsageError, match="already"):
        checkpoint_module(layer)
    with pytest.raises(UsageError, match="expected a module"):
        checkpoint_module(torch.relu)  # pyright: ignore[reportArgumentType]


def test_scopes_closed_out_of_order_are_an_error_and_can_still_be_closed():
    outer, inner = CheckpointScope("outer"), CheckpointScope("inner")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(UsageError, match="inner"):
        outer.close()
    inner.close()
    outer.close()


def test_generators_that_take_turns_in_their_scopes_leave_none_open():
    x = leaf()

    def running(name):
        with CheckpointScope(name):
            yield x.exp()
            yield x.sin()

    first, second = running("first"), running("second")
    for generator in (first, second, first):
        next(generator)
    with pytest.raises(UsageError, match="take turns"):
        next(first)
    assert not open_regions()
    y = next(second) * 2
    assert list(second) == []
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x.detach().cos())


def test_closing_a_scope_that_is_not_open_does_nothing():
    scope = CheckpointScope("closed")
    scope.close()
    with scope:
        scope.close()
        assert not open_regions()


def test_a_changed_tensor_is_an_error_that_says_what_to_do():
    x, scale = leaf(), torch.randn(3)
    with CheckpointScope("block", verify="off"):
        y = (x * scale.exp()).sin()
    scale.add_(1)
    with pytest.raises(ChangedTensorError, match="give the region a clone"):
        y.sum().backward()


def test_a_freed_graph_is_torchs_own_error_a_second_time():
    x = leaf()
    with CheckpointScope("block"):
        y = x.exp().sin()
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_a_backward_through_a_cleared_region_is_an_error_that_names_it():
    x = leaf()
    scope = CheckpointScope("cleared block")
    with scope:
        y = (x * 2).exp().sin()
    scope.nodes[0].clear_saved_activations()
    with pytest.raises(ClearedError, match="cleared block"):
        y.sum().backward()


_calls = itertools.count()


@torch.library.custom_op("recoup_tests::unsteady", mutates_args=())
def unsteady(x: Tensor) -> Tensor:
    """Return another result at every call: no generator tells why."""
    return x + next(_calls)


def test_a_nondeterministic_operator_is_an_error_that_names_it():
    x = leaf()
    with CheckpointScope("unsteady"):
        y = (x * unsteady(x.detach())).sin()
    with pytest.raises(MismatchError, match=r"recoup_tests\.unsteady"):
        y.sum().backward()


def test_after_an_error_in_backward_the_next_step_is_right():
    x = leaf()
    scope = CheckpointScope("recovering", verify="always")
    for wrong in (True, False):
        scale = torch.randn(3)
        with scope:
            y = (x * scale.exp()).sin()
        if wrong:
            scale.add_(1)
            with pytest.raises(ChangedTensorError):
                y.sum().backward()
        else:
            (found,) = torch.autograd.grad(y.sum(), x)
            assert torch.equal(found, scale.exp() * (x * scale.exp()).cos())


def test_a_tensor_that_is_given_other_memory_inside_a_region():
    x, mask = leaf(), torch.ones(3)
    with CheckpointScope("block"):
        y = (x * mask).sin()
        mask.data = torch.zeros(3)
    with pytest.raises(ChangedTensorError, match=r"other memory .* `\.data`"):
        y.sum().backward()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_parameter_that_is_given_other_memory_before_backward(depth):
    x = leaf()
    with contextlib.ExitStack() as regions:
        for level in range(depth):
            regions.enter_context(CheckpointScope(f"level {level}", verify="off"))
        y = (x.sin() * x).tanh()
    x.data = torch.zeros(3)
    with pytest.raises(ChangedTensorError, match=r"other memory, .* `\.data`"):
        y.sum().backward()


def test_a_parameter_is_not_changed_where_only_hooks_that_copy_keep_it():
    x = leaf()
    used = x.detach().clone()
    with torch.autograd.graph.save_on_cpu(), CheckpointScope("block"):
        y = x * x
    x.data = torch.zeros(3)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, 2 * used)

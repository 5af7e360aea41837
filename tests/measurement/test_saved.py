"""Saved bytes are those one computes by hand, and counting them changes nothing."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from recoup import CheckpointScope
from recoup.measurement.tracing.saved import SavedBytes

VECTOR = 4 * 100


@pytest.fixture
def leaf():
    return torch.linspace(-1, 1, 100, requires_grad=True)


def test_each_storage_counts_once(leaf):
    with SavedBytes() as saved:
        # exp saves its result; each sin its argument, which is that result or a view.
        power = leaf.exp()
        power.sin()
        power[10:].sin()
    assert (saved.bytes, saved.tensors) == (VECTOR, 3)


def test_a_linear_layer_saves_its_input_and_its_weight(leaf):
    linear = nn.Linear(100, 7)
    with SavedBytes() as everything:
        linear(leaf.view(1, 100))
    with SavedBytes(linear) as activations:
        linear(leaf.view(1, 100))
    assert everything.bytes == VECTOR + 7 * VECTOR
    assert activations.bytes == VECTOR
    assert everything.tensors == activations.tensors == 2


def test_nothing_is_saved_without_gradients(leaf):
    with SavedBytes() as saved, torch.no_grad():
        leaf.exp().sin()
    assert (saved.bytes, saved.tensors) == (0, 0)


def test_only_the_block_counts(leaf):
    leaf.exp()
    with SavedBytes() as saved:
        leaf.exp()
    leaf.exp()
    assert saved.bytes == VECTOR


def test_a_storage_at_a_reused_address_is_another(leaf):
    with SavedBytes() as saved:
        for _ in range(50):
            leaf.exp()
    assert saved.bytes == 50 * VECTOR


def test_a_sparse_tensor_counts_by_its_parts():
    sparse = torch.eye(10).to_sparse()
    with SavedBytes() as saved:
        torch.sparse.mm(sparse, torch.ones(10, 3, requires_grad=True))
    # Ten values with two indices of 8 bytes each.
    assert saved.bytes == 10 * 2 * 8 + 10 * 4


def test_a_wrapper_subclass_counts_by_its_inner_tensors():
    pair = TwoTensor(torch.ones(100), torch.ones(100)).requires_grad_()
    with SavedBytes() as saved:
        total = pair.exp().sum()
    assert saved.bytes == 2 * VECTOR
    total.backward()


def network():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(100, 20), nn.BatchNorm1d(20), nn.Dropout(), nn.Linear(20, 1)
    )


def test_gradients_are_bitwise_those_of_the_plain_run():
    def gradients(model):
        torch.manual_seed(2)
        return torch.autograd.grad(
            model(torch.randn(8, 100)).square().sum(), list(model.parameters())
        )

    plain = gradients(network())
    with SavedBytes() as saved:
        counted = gradients(network())
    assert saved.bytes > 0
    assert all(map(torch.equal, plain, counted))


def test_double_backward_works(leaf):
    with SavedBytes():
        cube = leaf.pow(3).sum()
    (first,) = torch.autograd.grad(cube, leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    torch.testing.assert_close(second, 6 * leaf.detach())


@pytest.mark.parametrize("counted", [False, True], ids=["plain", "counted"])
def test_a_saved_tensor_that_was_written_to_is_an_error_all_the_same(leaf, counted):
    words = "modified by an inplace operation.*is at version 1; expected version 0"
    if counted:
        with SavedBytes():
            power = leaf.exp()
    else:
        power = leaf.exp()
    total = power.sum()
    power.detach().add_(1)
    with pytest.raises(RuntimeError, match=words):
        total.backward()


def test_hooks_in_force_around_it_still_work(leaf):
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor.double()

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.float()),
        SavedBytes() as saved,
    ):
        total = leaf.exp().sum()
    total.backward()
    assert len(packed) == saved.tensors == 1
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, leaf.detach().exp())


def test_nested_counters_count_alike(leaf):
    with SavedBytes() as outer:
        leaf.exp()
        with SavedBytes() as inner:
            leaf.sin()
    assert (outer.bytes, outer.tensors) == (2 * VECTOR, 2)
    assert (inner.bytes, inner.tensors) == (VECTOR, 1)


def test_saved_tensors_die_as_in_the_plain_run(leaf):
    assert not gc.isenabled()
    with SavedBytes():
        power = leaf.exp()
    gone = weakref.ref(power.untyped_storage())
    total = power.sum()
    del power
    assert gone() is not None
    total.backward()
    assert gone() is None


def test_what_a_region_holds_counts(leaf):
    with SavedBytes() as saved:
        # Plain: exp and tanh save their results. The region holds only its input.
        with CheckpointScope("block"):
            out = leaf.exp().sin().tanh()
        out = out.sum()
    assert saved.bytes == VECTOR
    out.backward()
    plain = leaf.detach().clone().requires_grad_()
    plain.exp().sin().tanh().sum().backward()
    assert leaf.grad is not None
    assert plain.grad is not None
    assert torch.equal(leaf.grad, plain.grad)


def test_inside_a_region_it_counts_what_plain_autograd_would_save(leaf):
    with CheckpointScope("block"):
        with SavedBytes() as saved:
            out = leaf.exp().sin().tanh()
        out = out.sum()
    assert saved.bytes == 2 * VECTOR
    out.backward()
    assert leaf.grad is not None


@pytest.mark.parametrize("saves", [torch.tanh, torch.sin, torch.relu_])
def test_a_graph_that_is_never_run_backward_is_freed(leaf, saves):
    """An operator that saves its own result does not keep itself alive."""
    gc.disable()
    try:
        with SavedBytes():
            y = saves(saves(leaf * 2))
        storage = weakref.ref(y.untyped_storage())
        del y
        assert storage() is None
    finally:
        gc.enable()


def test_a_second_derivative_through_counted_values_is_the_plain_one(leaf):
    def second(y: torch.Tensor) -> torch.Tensor:
        (first,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
        return torch.autograd.grad(first.sum(), leaf)[0]

    with SavedBytes():
        counted = leaf.tanh().exp()
    assert torch.equal(second(counted), second(leaf.tanh().exp()))

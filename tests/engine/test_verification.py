"""A recomputed value must be the value of forward, and what differs is named."""

import functools
import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from recoup import (
    CheckpointScope,
    checkpoint,
    checkpoint_module,
    keep,
    uncheckpoint_module,
)
from recoup.backend.operators.fingerprints import fingerprint
from recoup.engine.verification.verification_log import LEDGER
from recoup.errors import MismatchError, UsageError
from tests.support.counting import Alive, Operators

_calls = itertools.count()
_names = itertools.count()


@torch.library.custom_op("recoup_tests::fickle", mutates_args=())
def fickle(x: Tensor) -> Tensor:
    """Give another result at every call."""
    return x + next(_calls)


@torch.library.custom_op("recoup_tests::steady", mutates_args=())
def steady(x: Tensor) -> Tensor:
    """Give the same result at every call."""
    return x + 1


@torch.library.custom_op("recoup_tests::switched", mutates_args=())
def switched(x: Tensor) -> Tensor:
    """Give another result where a switch is on, as a kernel that it chooses does."""
    return x + (1 if torch.backends.cudnn.benchmark else 2)


def vector() -> Tensor:
    return torch.randn(50, requires_grad=True)


def fresh(prefix: str = "scope") -> str:
    """Return a name that no scope has had: it is at its first use."""
    return f"{prefix} {next(_names)}"


def multiplied(x: Tensor, operator=fickle) -> Tensor:
    """Use an operator's result in a product, which saves it."""
    return (x * operator(x.detach())).sin()


def test_a_nondeterministic_operator_is_named_at_the_first_use():
    x = vector()
    with CheckpointScope(fresh()) as scope:
        y = multiplied(x)
    with pytest.raises(MismatchError, match=re.escape("recoup_tests.fickle")) as caught:
        y.sum().backward()
    assert scope.name in str(caught.value)
    assert "nondeterministic" in str(caught.value)
    assert "keep" in str(caught.value)


def test_a_switch_that_is_set_inside_a_region_is_named_among_the_reasons():
    x = vector()
    with CheckpointScope(fresh()), torch.backends.cudnn.flags(benchmark=True):
        y = multiplied(x, switched)
    with pytest.raises(MismatchError, match=r"a switch .* around the whole step"):
        y.sum().backward()


def test_a_switch_around_the_whole_step_is_the_remedy():
    with torch.backends.cudnn.flags(benchmark=True):
        x = vector()
        with CheckpointScope(fresh()):
            y = multiplied(x, switched)
        y.sum().backward()


def test_a_deterministic_custom_operator_is_replayed_without_complaint():
    x = vector()
    with CheckpointScope(fresh(), verify="full"):
        y = multiplied(x, steady)
    (ours,) = torch.autograd.grad(y.sum(), x)
    (twins,) = torch.autograd.grad((x * (x.detach() + 1)).sin().sum(), x)
    assert torch.equal(ours, twins)


def test_keeping_the_output_of_a_nondeterministic_operator_is_the_remedy():
    x = vector()
    with CheckpointScope(fresh(), verify="always"):
        noise = keep(fickle(x.detach()))
        y = (x * noise).sin()
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, noise * (x * noise).cos())


def forms(x: Tensor, form: str, name: str) -> Tensor:
    if form == "function":

        def function(x: Tensor) -> Tensor:
            return multiplied(x)

        return checkpoint(functools.partial(function), x)

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return multiplied(x)

    return checkpoint_module(Module(), name=name)(x)


@pytest.mark.parametrize("form", ["function", "module"])
def test_every_form_of_region_is_verified_at_its_first_use(form):
    y = forms(vector(), form, fresh())
    with pytest.raises(MismatchError, match="fickle"):
        y.sum().backward()


def change_by_data(tensor: Tensor) -> None:
    tensor.data.add_(1)


def change_by_numpy(tensor: Tensor) -> None:
    tensor.detach().numpy()[0] += 1


def change_through_a_view(tensor: Tensor) -> None:
    tensor.data.view(-1)[3:4].zero_()


@pytest.mark.parametrize(
    "change", [change_by_data, change_by_numpy, change_through_a_view]
)
def test_a_write_behind_autograds_back_is_an_error(change):
    x, scale = vector(), torch.randn(50)
    with CheckpointScope(fresh()):
        y = (x * (scale * 2)).sin()
    change(scale)
    with pytest.raises(MismatchError, match=r"mul"):
        y.sum().backward()


@pytest.mark.parametrize("verify", ["first", "always"])
def test_a_write_inside_the_region_that_no_operator_made_is_an_error(verify):
    x = vector()
    with CheckpointScope(fresh(), verify=verify):
        product = x * 2
        y = product.sin()
        change_by_numpy(product)
    with pytest.raises(MismatchError, match=r"what aten.mul.Tensor returned was chang"):
        y.sum().backward()


def test_a_kept_tensor_that_outlives_its_region_is_not_taken_for_a_replayed_one():
    x = vector()
    with CheckpointScope(fresh(), verify="always"):
        with CheckpointScope(fresh(), verify="always"):
            product = x * 2
            y = product.sin()
            keep(product)
        y = y.sin()
    y.sum().backward()


def test_a_change_before_it_is_saved_is_no_change():
    x = vector()
    with CheckpointScope(fresh(), verify="always"):
        ones = torch.ones(50)
        product = x * ones
        ones[3] = 7
        y = product * ones.exp()
    y.sum().backward()


def test_a_single_bit_is_noticed():
    x, scale = vector(), torch.randn(50)
    with CheckpointScope(fresh()):
        y = (x * (scale * 2)).sin()
    scale.data[17] = torch.nextafter(scale[17], torch.tensor(torch.inf))
    with pytest.raises(MismatchError):
        y.sum().backward()


def test_two_elements_that_swap_places_are_noticed():
    x, scale = vector(), torch.randn(50)
    with CheckpointScope(fresh()):
        y = (x * (scale * 2)).sin()
    scale.data[[3, 30]] = scale.data[[30, 3]]
    with pytest.raises(MismatchError):
        y.sum().backward()


def test_verification_off_sees_nothing():
    x = vector()
    with CheckpointScope(fresh(), verify="off"):
        y = multiplied(x)
    y.sum().backward()
    assert x.grad is not None


def test_full_verification_names_the_first_operator_that_differs():
    x = vector()
    with CheckpointScope(fresh(), verify="full"):
        y = x * fickle(x.detach()).exp().cos()
    with pytest.raises(MismatchError) as caught:
        y.sum().backward()
    assert "recoup_tests.fickle.default is the first operator" in str(caught.value)
    assert "50 of 50 elements" in str(caught.value)


def test_full_verification_names_a_write_behind_autograds_back():
    x, scale = vector(), torch.randn(50)
    with CheckpointScope(fresh(), verify="full"):
        y = x * (scale * 2).exp()
    scale.data[7] += 1
    with pytest.raises(MismatchError, match="1 of 50 elements"):
        y.sum().backward()


def test_full_verification_accepts_uninitialised_memory_that_is_overwritten():
    x = vector()
    with CheckpointScope(fresh(), verify="full"):
        buffer = torch.empty(50)
        buffer.copy_(x.detach().exp())
        noise = torch.empty_like(x).uniform_()
        y = (buffer * x).sin() * noise
    del buffer, noise
    garbage = [torch.full((50,), 3.0) for _ in range(8)]
    del garbage
    y.sum().backward()


def test_of_a_buffer_that_one_operator_writes_twice_the_blank_part_is_not_compared():
    x = vector()
    with CheckpointScope(fresh(), verify="full"):
        buffer = torch.empty(3, 50)
        buffer[1] = x.detach()
        torch.ops.aten._foreach_add_([buffer[1], buffer[1]], 1.0)
        y = (buffer[1] * x).sin()
    del buffer
    garbage = [torch.full((3, 50), 3.0) for _ in range(8)]
    del garbage
    y.sum().backward()
    shifted = x.detach() + 1.0 + 1.0
    assert x.grad is not None
    assert torch.equal(x.grad, (shifted * x.detach()).cos() * shifted)


class Loop:
    """A scope used as in a training loop: made at one place, again and again."""

    def __init__(self, **options: str) -> None:
        self.name = fresh("loop")
        self.options = options

    def step(self, *, wrong: bool, operators: int = 1) -> None:
        """Run forward and backward once, changing a tensor in between if asked."""
        x, scale = vector(), torch.randn(50)
        with CheckpointScope(self.name, **self.options):  # pyright: ignore[reportArgumentType]
            product = scale * 2
            for _ in range(operators):
                product = product.exp()
            y = (x * product).sin()
        if wrong:
            scale.data.add_(1)
        y.sum().backward()


def test_the_second_use_of_a_scope_is_not_verified():
    loop = Loop()
    loop.step(wrong=False)
    with Operators() as operators:
        loop.step(wrong=False)
    assert operators.counts["_local_scalar_dense"] == 0
    loop.step(wrong=True)


def test_a_scope_is_verified_again_after_its_operators_changed():
    loop = Loop()
    loop.step(wrong=False)
    loop.step(wrong=False, operators=2)
    with pytest.raises(MismatchError):
        loop.step(wrong=True, operators=2)


def test_operators_that_were_verified_before_are_not_verified_again():
    loop = Loop()
    for count in (1, 2, 2, 1, 2):
        loop.step(wrong=False, operators=count)
    loop.step(wrong=True, operators=1)
    loop.step(wrong=True, operators=2)


def test_a_scope_that_failed_is_verified_until_it_passes_a_few_times_in_a_row():
    loop = Loop()
    for passes in (0, 1, 3, 4):
        with pytest.raises(MismatchError):
            loop.step(wrong=True)
        for _ in range(passes):
            loop.step(wrong=False)
    loop.step(wrong=True)


@pytest.mark.parametrize("verify", ["always", "full"])
def test_every_use_is_verified_on_request(verify):
    loop = Loop(verify=verify)
    for _ in range(2):
        loop.step(wrong=False)
    with pytest.raises(MismatchError):
        loop.step(wrong=True)


def test_scopes_of_the_same_name_in_different_places_are_verified_apart():
    name = fresh()
    x, scale = vector(), torch.randn(50)
    with CheckpointScope(name):
        y = (x * (scale * 2)).sin()
    y.sum().backward()
    with CheckpointScope(name):
        z = (x * (scale * 2)).sin()
    scale.data.add_(1)
    with pytest.raises(MismatchError):
        z.sum().backward()


def test_nested_regions_are_verified_each():
    x, scale = vector(), torch.randn(50)
    with CheckpointScope(fresh("outer")), CheckpointScope(fresh("inner")) as inner:
        y = (x * (scale * 2)).sin()
    scale.data.add_(1)
    with pytest.raises(MismatchError, match=inner.name):
        y.sum().backward()


def test_verification_reads_nothing_from_the_device_before_the_end_of_backward():
    x = vector()
    with CheckpointScope(fresh("first")):
        y = x.exp().sin().tanh()
    with CheckpointScope(fresh("second")):
        y = y.exp().sin().tanh()
    with Operators() as operators:
        y.sum().backward()
    reading = [name.startswith("_local_scalar") for name in operators.names]
    assert any(reading)
    assert all(reading[reading.index(True) :])


def test_forward_reads_nothing_from_the_device():
    x = vector()
    with Operators() as operators, CheckpointScope(fresh()):
        x.exp().sin().tanh()
    assert operators.counts["_local_scalar_dense"] == 0
    assert operators.counts["equal"] == 0


def test_fingerprints_keep_no_tensor():
    x = vector()
    with Alive() as alive:
        with CheckpointScope(fresh()):
            y = x.exp().sin().tanh()
        each = fingerprint(y).nbytes
        assert each <= 3 * 8
        # exp (saved twice) and tanh, whose result the user holds: one byte says
        # whether it was still what was saved when the region ended.
        assert alive.sizes == [1, each, each, y.nbytes]


def test_full_verification_lets_go_of_its_copies_with_the_graph():
    x = vector()
    with Alive() as alive:
        with CheckpointScope(fresh(), verify="full"):
            y = x.exp().sin().tanh()
        assert alive.total_bytes > 3 * y.nbytes
        y.sum().backward()
        del y
        x.grad = None
        assert alive.sizes == []


def test_a_mismatch_leaves_nothing_behind():
    x, scale = vector(), torch.randn(50)
    with Alive() as alive:
        with CheckpointScope(fresh()):
            y = (x * (scale * 2)).sin()
        scale.data.add_(1)
        with pytest.raises(MismatchError):
            y.sum().backward()
        del y
        x.grad = None
        assert alive.sizes == []


def test_random_operators_pass_full_verification():
    x = vector()
    with CheckpointScope(fresh(), verify="full"):
        y = torch.nn.functional.dropout(x.exp()).sin()
        y = y * torch.rand_like(y)
    y.sum().backward()


def test_not_a_number_and_infinity_are_equal_to_themselves():
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0], requires_grad=True)
    with CheckpointScope(fresh(), verify="full"):
        y = (x * 2).sin().exp()
    y.sum().backward()


def test_an_unknown_word_for_verify_is_refused():
    with pytest.raises(UsageError, match="'first', 'always', 'full', 'off'"):
        CheckpointScope("scope", verify="sometimes")  # pyright: ignore[reportArgumentType]


DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [0, 1, 2, 7, 1000])
def test_a_fingerprint_depends_on_every_element_and_its_place(dtype, length):
    tensor = torch.randn(length).mul(100).to(dtype)
    before = fingerprint(tensor)
    assert torch.equal(before, fingerprint(tensor.clone()))
    for place in {0, length // 2, length - 1} - {-1} if length else set():
        changed = tensor.clone()
        changed.view(torch.uint8)[place * tensor.element_size()] ^= 1
        assert not torch.equal(before, fingerprint(changed))


def test_a_fingerprint_does_not_depend_on_strides():
    tensor = torch.randn(6, 7)
    apart = torch.randn(12, 14)[::2, ::2].copy_(tensor)
    assert torch.equal(fingerprint(tensor), fingerprint(apart))


def test_every_module_is_verified_whatever_others_of_its_class_were():
    class Multiplied(torch.nn.Module):
        def forward(self, x: Tensor, operator: Any) -> Tensor:
            return multiplied(x, operator)

    checkpoint_module(Multiplied())(vector(), steady).sum().backward()
    for _ in range(2):
        module = checkpoint_module(Multiplied())
        with pytest.raises(MismatchError):
            module(vector(), fickle).sum().backward()


def test_nothing_is_remembered_of_modules_that_are_gone():
    def run() -> None:
        module = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Sigmoid())
        for _ in range(3):
            checkpoint_module(module)
            module(vector()).sum().backward()
            uncheckpoint_module(module)

    run()
    before = len(LEDGER)
    for _ in range(5):
        run()
    assert len(LEDGER) == before

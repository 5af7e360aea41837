"""The meters give the numbers one computes by hand, at every moment."""

import gc
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
)
from torch.utils.flop_counter import FlopCounterMode

from recoup.backend.memory.meters import AllocatorMeter, StorageMeter, device_meter

# Bytes of the float32 vectors used throughout: 4 a number.
VECTOR = 4 * 100


@pytest.fixture
def meter():
    with StorageMeter() as meter:
        yield meter


def test_every_operator_output_counts(meter):
    first = torch.ones(100)
    second = first + 1
    assert meter.live_bytes == 2 * VECTOR
    del first, second
    assert (meter.live_bytes, meter.peak_bytes) == (0, 2 * VECTOR)


def test_views_count_once_and_in_place_operators_nothing(meter):
    ones = torch.ones(100)
    views = [ones[1:], ones.view(10, 10).T, ones.detach()]
    ones.add_(1).mul_(2)
    torch.add(ones, 1, out=ones)
    assert meter.live_bytes == meter.peak_bytes == VECTOR
    del ones
    assert meter.live_bytes == VECTOR
    del views
    assert meter.live_bytes == 0


def test_the_peak_lies_in_the_middle_of_an_expression(meter):
    # ones, ones + 1; then its product while the sum still lives; then the total.
    total = ((torch.ones(100) + 1) * 3).sum()
    assert (meter.live_bytes, meter.peak_bytes) == (4, 2 * VECTOR)
    meter.reset_peak()
    assert meter.peak_bytes == 4
    del total


def test_a_whole_result_of_several_tensors_counts(meter):
    values, indices = torch.ones(10, 10).max(dim=1)
    assert meter.live_bytes == 10 * 4 + 10 * 8
    assert meter.peak_bytes == VECTOR + 10 * 4 + 10 * 8
    del values, indices


def test_what_existed_before_does_not_count_even_when_viewed():
    outside = torch.ones(100)
    linear = nn.Linear(10, 10)
    with StorageMeter() as meter:
        view = outside.view(10, 10)
        view.add_(1)
        out = linear(view)
    assert meter.live_bytes == meter.peak_bytes == VECTOR
    del out


def test_what_is_tracked_counts_once():
    outside = torch.ones(100)
    linear = nn.Linear(10, 10)
    linear.weight.grad = torch.zeros(10, 10)
    linear.register_buffer("steps", torch.zeros(3))
    with StorageMeter() as meter:
        meter.track(outside, outside[3:], linear, linear.weight)
        assert meter.live_bytes == VECTOR + 2 * VECTOR + 40 + 12
        linear.zero_grad()
        assert meter.live_bytes == VECTOR + VECTOR + 40 + 12
        del outside
        assert meter.live_bytes == VECTOR + 40 + 12


def test_saved_tensors_count_until_backward_frees_them(meter):
    leaf = torch.ones(100, requires_grad=True)
    # exp saves its result, which then nobody else holds; sum saves nothing.
    loss = leaf.exp().sum()
    assert meter.live_bytes == 2 * VECTOR + 4
    loss.backward()
    # The leaf, its gradient and the loss.
    assert meter.live_bytes == 2 * VECTOR + 4
    del leaf, loss
    assert meter.live_bytes == 0


def test_backward_counts_like_forward(meter):
    leaf = torch.ones(100, requires_grad=True)
    loss = leaf.exp().sum()
    meter.reset_peak()
    loss.backward()
    # Leaf, saved result, loss, the gradient of the loss (expanded: no new storage),
    # and the gradient of the leaf, made before the saved result is freed.
    assert meter.peak_bytes == 3 * VECTOR + 4 + 4


def test_a_dropped_graph_frees_what_it_saved(meter):
    leaf = torch.ones(100, requires_grad=True)
    loss = leaf.exp().sum()
    del loss
    assert meter.live_bytes == VECTOR


def test_tensors_made_from_python_and_arrays_count(meter):
    made = [torch.tensor([1.0, 2.0]), torch.ones(1).new_tensor([1.0])]
    assert meter.live_bytes == 8 + 4
    del made


@pytest.mark.parametrize("length", [0, 50, 1000])
def test_a_tensor_resize_counts(meter, length):
    # A tensor that shrinks keeps its storage; resizing to more makes it larger.
    ones = torch.ones(100)
    ones.resize_(length)
    assert meter.live_bytes == max(VECTOR, 4 * length)


def test_an_output_argument_that_is_resized_counts(meter):
    out = torch.empty(0)
    torch.add(torch.ones(100), 1, out=out)
    assert (meter.live_bytes, meter.peak_bytes) == (VECTOR, 2 * VECTOR)


def test_a_storage_resize_counts_at_once(meter):
    ones = torch.ones(100)
    ones.untyped_storage().resize_(0)
    assert meter.live_bytes == 0
    others = torch.ones(50)
    assert meter.peak_bytes == VECTOR
    ones.untyped_storage().resize_(VECTOR)
    assert meter.live_bytes == meter.peak_bytes == VECTOR + 200
    del others


def test_an_operator_that_resizes_its_argument_and_returns_nothing_counts():
    # As inductor's resize_storage_bytes_, which FSDP uses in compiled code: it goes
    # past the method that a meter watches.
    plain_resize = torch.UntypedStorage.resize_

    def grow(x):
        plain_resize(x.untyped_storage(), 2 * VECTOR)

    with torch.library._scoped_library("recoup_meter_test", "FRAGMENT") as library:
        library.define("grow(Tensor(a!) x) -> ()")
        library.impl("grow", grow, "CompositeExplicitAutograd")
        with StorageMeter() as meter:
            ones = torch.ones(100)
            torch.ops.recoup_meter_test.grow(ones)
            assert meter.live_bytes == 2 * VECTOR


def test_frees_after_leaving_are_noticed_and_allocations_are_not():
    with StorageMeter() as meter:
        ones = torch.ones(100)
    other = ones + 1
    assert (meter.live_bytes, meter.peak_bytes) == (VECTOR, VECTOR)
    del ones, other
    assert (meter.live_bytes, meter.peak_bytes) == (0, VECTOR)


def test_a_meter_may_be_entered_again():
    meter = StorageMeter()
    with meter:
        first = torch.ones(100)
    with meter, meter:
        second = torch.ones(100)
    assert meter.live_bytes == 2 * VECTOR
    del first, second


def test_a_meter_only_counts_its_device():
    with StorageMeter("meta") as meter:
        torch.ones(100)
        kept = torch.ones(50, device="meta")
    assert (meter.live_bytes, meter.peak_bytes) == (200, 200)
    del kept


def test_nested_meters_count_alike():
    with StorageMeter() as outer:
        first = torch.ones(100)
        with StorageMeter() as inner:
            second = (first + 1).exp()
        assert (inner.live_bytes, inner.peak_bytes) == (VECTOR, 2 * VECTOR)
        assert (outer.live_bytes, outer.peak_bytes) == (2 * VECTOR, 3 * VECTOR)
    del first, second


class Seen(TorchDispatchMode):
    """A mode that notes the operators it sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("meter_is_inside", [True, False])
def test_other_modes_see_what_they_would_see_alone(meter_is_inside):
    def program():
        leaf = torch.ones(8, 8, requires_grad=True)
        (leaf @ leaf).relu().sum().backward()

    with Seen() as alone:
        program()
    seen, flops, meter = Seen(), FlopCounterMode(display=False), StorageMeter()
    first, last = (seen, meter) if meter_is_inside else (meter, seen)
    with first, flops, last:
        program()
    assert seen.names == alone.names
    assert flops.get_total_flops() == 3 * 2 * 8**3
    # The peak: the leaf, the gradient of the product, the gradients of its two factors,
    # the loss and its gradient.
    assert (meter.live_bytes, meter.peak_bytes) == (0, 4 * 256 + 4 + 4)


def test_results_are_those_without_a_meter():
    def program():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.BatchNorm1d(8))
        model(torch.randn(4, 8)).square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert len(gradients) == 4
        return [*gradients, *model.buffers()]

    plain = program()
    with StorageMeter():
        metered = program()
    assert all(map(torch.equal, plain, metered))


def test_the_parts_of_a_composite_operator_count_in_inference_mode():
    weight, bias = torch.ones(5, 10), torch.ones(5)
    with torch.inference_mode(), StorageMeter() as meter:
        inner = torch.ones(2, 3, 10)
        out = nn.functional.linear(inner, weight, bias)
    with StorageMeter() as twin, torch.no_grad():
        plain = nn.functional.linear(torch.ones(2, 3, 10), weight, bias)
        assert meter.peak_bytes == twin.peak_bytes
    assert torch.equal(out, plain)
    assert meter.live_bytes == 2 * 3 * (10 + 5) * 4


def test_a_wrapper_subclass_counts_by_its_inner_tensors(meter):
    pair = TwoTensor(torch.ones(100), torch.ones(100))
    total = pair + pair
    assert meter.live_bytes == 4 * VECTOR
    del pair, total
    assert meter.live_bytes == 0


def test_a_sparse_result_counts_by_its_parts(meter):
    # 100 one-dimensional indices of 8 bytes and 100 values.
    sparse = torch.ones(100).to_sparse()
    assert meter.live_bytes == 100 * 8 + VECTOR
    del sparse


def test_nothing_is_kept_alive_and_nothing_needs_the_collector(meter):
    assert not gc.isenabled()
    ones = torch.ones(100)
    gone = weakref.ref(ones)
    del ones
    assert gone() is None
    leaving = StorageMeter()
    with leaving:
        kept = torch.ones(100)
    gone = weakref.ref(leaving)
    del leaving
    assert gone() is None
    del kept


def test_an_exception_inside_leaves_no_mode_and_no_patch_behind():
    plain = torch.UntypedStorage.resize_

    def fail():
        with StorageMeter() as meter:
            torch.ones(100)
            raise KeyError(meter.peak_bytes)

    with pytest.raises(KeyError, match="400"):
        fail()
    assert torch.UntypedStorage.resize_ is plain
    assert _get_current_dispatch_mode() is None


def test_threads_have_their_own_meters():
    peaks = {}

    def work(length):
        with StorageMeter() as meter:
            for _ in range(50):
                torch.ones(length).exp()
        peaks[length] = meter.peak_bytes

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert peaks == {n: 8 * n for n in range(1, 9)}


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("make"), st.integers(0, 50)),
            st.tuples(st.sampled_from(["free", "view", "copy", "write"]), st.just(0)),
            st.tuples(st.just("reset"), st.just(0)),
        ).flatmap(lambda event: st.tuples(st.just(event), st.integers(0, 30))),
        max_size=40,
    )
)
def test_any_program_gives_the_numbers_of_a_plain_model(events):
    # Each handle is a tensor and the number of its storage; a storage lives while
    # any handle names it.
    handles, sizes_bytes, peak_bytes = [], [], 0
    with StorageMeter() as meter:
        for (kind, number), choice in events:
            tensor = storage = None
            if handles:
                tensor, storage = handles[choice % len(handles)]
            if kind == "make":
                handles.append(
                    (torch.empty(number, dtype=torch.uint8), len(sizes_bytes))
                )
                sizes_bytes.append(number)
            elif kind == "reset":
                meter.reset_peak()
                peak_bytes = 0
            elif tensor is not None and kind == "free":
                del handles[choice % len(handles)]
            elif tensor is not None and kind == "view":
                handles.append((tensor[len(tensor) // 2 :], storage))
            elif tensor is not None and kind == "copy":
                handles.append((tensor + 1, len(sizes_bytes)))
                sizes_bytes.append(tensor.numel())
            elif tensor is not None:
                tensor.add_(1)
            del tensor
            live_bytes = sum(sizes_bytes[s] for s in {s for _, s in handles})
            peak_bytes = max(peak_bytes, live_bytes)
            assert (meter.live_bytes, meter.peak_bytes) == (live_bytes, peak_bytes)


def test_the_meter_of_a_device_fits_the_device(device):
    with device_meter(device) as meter:
        before = meter.live_bytes
        ones = torch.ones(1024, device=device)
        assert meter.live_bytes - before == 4096
        twos = ones + 1
        del twos
        meter.track(ones)
        assert meter.peak_bytes - before == 2 * 4096
        meter.reset_peak()
        assert meter.peak_bytes == meter.live_bytes == before + 4096
        del ones
        assert meter.live_bytes == before
    expected = StorageMeter if device.type == "cpu" else AllocatorMeter
    assert type(meter) is expected


@pytest.mark.cuda
def test_the_peak_of_an_allocator_is_frozen_on_leaving():
    device = torch.accelerator.current_accelerator()
    assert device is not None
    with device_meter(device) as meter:
        torch.ones(1024, device=device)
    peak_bytes = meter.peak_bytes
    more = torch.ones(1 << 20, device=device)
    assert meter.peak_bytes == peak_bytes
    del more


def test_tensors_without_memory_count_only_where_they_are_asked_for():
    with StorageMeter() as everywhere, StorageMeter("meta") as nowhere:
        tensor = torch.ones(100, device="meta") + 1
    assert everywhere.peak_bytes == 0
    assert nowhere.live_bytes == tensor.nbytes

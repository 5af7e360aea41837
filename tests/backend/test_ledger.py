"""The ledger counts each storage once, from the day it is added to its death."""

import gc
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from recoup.backend.memory.ledger import StorageLedger, storages_in

ONES = [1.0, 1.0, 1.0]


def add(ledger, tensor):
    return ledger.add(tensor.untyped_storage())


def test_a_view_is_the_same_storage():
    ledger = StorageLedger()
    ones = torch.ones(10)
    assert add(ledger, ones)
    assert not add(ledger, ones[5:].view(5, 1).T)
    assert ledger.live_bytes == 40


def test_the_last_owner_takes_the_bytes_with_it():
    ledger = StorageLedger()
    ones = torch.ones(10)
    add(ledger, ones)
    view = ones[9:]
    del ones
    assert ledger.live_bytes == 40
    del view
    assert ledger.live_bytes == 0


def test_a_storage_that_only_autograd_owns_lives():
    ledger = StorageLedger()
    leaf = torch.ones(10, requires_grad=True)
    power = leaf.exp()
    add(ledger, power)
    total = power.sum()
    del power
    assert ledger.live_bytes == 40
    total.backward()
    assert ledger.live_bytes == 0


def test_a_storage_that_a_tensor_lets_go_of_dies():
    ledger = StorageLedger()
    ones = torch.ones(10)
    add(ledger, ones)
    ones.data = torch.ones(3)
    assert ledger.live_bytes == 0


def test_a_storage_at_a_reused_address_is_new():
    # The CPU's allocator gives the same address again at once, most times.
    ledger = StorageLedger()
    for _ in range(100):
        assert add(ledger, torch.ones(10))
    assert (ledger.live_bytes, ledger.peak_bytes, ledger.total_bytes) == (0, 40, 4000)


def test_a_free_on_another_thread_is_noticed():
    ledger = StorageLedger()
    box = [torch.ones(10)]
    add(ledger, box[0])
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert ledger.live_bytes == 0


def test_threads_that_add_and_free_at_once_lose_nothing():
    ledger = StorageLedger()
    kept = []

    def work():
        for length in range(1, 200):
            tensor = torch.ones(length)
            add(ledger, tensor)
            if length % 10 == 0:
                kept.append(tensor)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.live_bytes == 8 * 4 * sum(range(10, 200, 10))
    assert ledger.total_bytes == 8 * 4 * sum(range(1, 200))


def test_a_free_inside_a_garbage_collection_is_noticed():
    ledger = StorageLedger()
    ones = torch.ones(10)
    add(ledger, ones)
    cycle: list[object] = [ones]
    cycle.append(cycle)
    del cycle, ones
    assert ledger.live_bytes == 40
    gc.collect()
    assert ledger.live_bytes == 0


def test_a_storage_resize_counts_at_once_while_watched():
    ledger = StorageLedger()
    ones = torch.ones(10)
    add(ledger, ones)
    ledger.watch_resizes()
    assert ones.untyped_storage().resize_(100) is ones.untyped_storage()
    assert (ledger.live_bytes, ledger.peak_bytes) == (100, 100)
    ones.untyped_storage().resize_(0)
    assert (ledger.live_bytes, ledger.peak_bytes) == (0, 100)
    ledger.unwatch_resizes()


def test_the_last_watcher_puts_torch_back():
    plain = torch.UntypedStorage.resize_
    first, second = StorageLedger(), StorageLedger()
    for ledger in (first, second, first):
        ledger.watch_resizes()
    first.unwatch_resizes()
    assert torch.UntypedStorage.resize_ is not plain
    second.unwatch_resizes()
    first.unwatch_resizes()
    assert torch.UntypedStorage.resize_ is plain


def test_the_ledger_and_the_storages_keep_nothing_alive():
    ledger = StorageLedger()
    ones = torch.ones(10)
    add(ledger, ones)
    gone = weakref.ref(ledger)
    del ledger
    assert gone() is None
    watched = weakref.ref(ones)
    del ones
    assert watched() is None


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("make", "sizes_bytes"),
    [
        (lambda: torch.eye(3).to_sparse(), [48, 12]),
        (lambda: torch.sparse_csr_tensor([0, 1, 3], [2, 0, 1], ONES), [24, 24, 12]),
        (lambda: torch.sparse_csc_tensor([0, 1, 3], [2, 0, 1], ONES), [24, 24, 12]),
        (lambda: torch.ones(3).to_mkldnn(), []),
        (lambda: TwoTensor(torch.ones(2), torch.ones(3)[:2]), [8, 12]),
    ],
    ids=["coo", "csr", "csc", "opaque", "wrapper"],
)
def test_every_layout_yields_the_storages_of_its_parts(make, sizes_bytes):
    assert [storage.nbytes() for storage in storages_in(make())] == sizes_bytes


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 50)),
            st.tuples(st.just("again"), st.integers(0, 20)),
            st.tuples(st.just("free"), st.integers(0, 20)),
            st.tuples(st.just("resize"), st.integers(0, 400)),
            st.tuples(st.just("reset"), st.just(0)),
        ),
        max_size=40,
    )
)
def test_any_sequence_gives_the_numbers_of_a_plain_model(events):
    ledger = StorageLedger()
    ledger.watch_resizes()
    tensors, sizes_bytes, peak_bytes = [], [], 0
    for kind, number in events:
        if kind == "add":
            tensors.append(torch.empty(number, dtype=torch.uint8))
            sizes_bytes.append(number)
            assert add(ledger, tensors[-1])
        elif kind == "reset":
            peak_bytes = 0
            ledger.reset_peak()
        elif tensors and kind == "again":
            assert not add(ledger, tensors[number % len(tensors)])
        elif tensors and kind == "free":
            del sizes_bytes[number % len(tensors)], tensors[number % len(tensors)]
        elif tensors:
            tensors[-1].untyped_storage().resize_(number)
            sizes_bytes[-1] = number
        peak_bytes = max(peak_bytes, sum(sizes_bytes))
        assert ledger.live_bytes == sum(sizes_bytes)
        assert ledger.peak_bytes == peak_bytes
    ledger.unwatch_resizes()

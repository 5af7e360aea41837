"""The peak of a step: the right figure, and no reading that nobody asked for."""

import weakref

import pytest
import torch

from recoup.backend.memory.meters import AllocatorMeter, StorageMeter
from recoup.train.run_results import Peak, Peaks

MEBIBYTE = 1 << 20


def test_a_peak_that_is_read_at_once_does_not_see_what_comes_later():
    with Peak(StorageMeter(), at_once=True) as peak:
        ones = torch.ones(100)
    more = torch.ones(1000)
    assert peak.bytes == 4 * ones.numel() < 4 * more.numel()


def test_without_a_meter_there_is_no_figure():
    peaks = Peaks(torch.device("cpu"), wanted=None, existing=tuple)
    with peaks.next() as peak:
        torch.ones(100)
    assert peak.bytes is None


def test_what_existed_before_counts():
    weight = torch.ones(1000)
    peaks = Peaks(torch.device("cpu"), wanted=True, existing=lambda: [weight])
    with peaks.next() as peak:
        ones = torch.ones(100)
    assert peak.bytes == 4 * (weight.numel() + ones.numel())


def test_a_peak_keeps_no_meter_once_it_is_known():
    meter = StorageMeter()
    found = weakref.ref(meter)
    with Peak(meter, at_once=True) as peak:
        torch.ones(100)
    del meter
    assert found() is None
    assert peak.bytes == 400


@pytest.fixture
def reads(monkeypatch):
    """Counts how often the allocator is read."""
    found = []
    read = AllocatorMeter.peak_bytes.fget
    assert read is not None

    def counted(meter):
        found.append(meter)
        return read(meter)

    monkeypatch.setattr(AllocatorMeter, "peak_bytes", property(counted))
    return found


def on_accelerator(**options):
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return Peaks(device, existing=tuple, **options), device


@pytest.mark.cuda
def test_an_allocator_is_read_only_for_who_asks(reads):
    peaks, device = on_accelerator(wanted=None)
    for _ in range(3):
        with peaks.next() as peak:
            torch.ones(MEBIBYTE, device=device)
        del peak
    assert reads == []
    with peaks.next() as peak:
        torch.ones(MEBIBYTE, device=device)
    assert peak.bytes == peak.bytes
    assert len(reads) == 1


@pytest.mark.cuda
def test_a_result_that_somebody_keeps_has_its_own_figure():
    peaks, device = on_accelerator(wanted=None)
    kept = []
    for size in (8, 2, 4):
        with peaks.next() as peak:
            torch.ones(size * MEBIBYTE, device=device)
        kept.append(peak)
    first, second, third = (peak.bytes for peak in kept)
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first - second, third - second) == (24 * MEBIBYTE, 8 * MEBIBYTE)


@pytest.mark.cuda
def test_who_asks_for_measuring_gets_the_figure_of_the_step_alone():
    peaks, device = on_accelerator(wanted=True)
    with peaks.next() as peak:
        torch.ones(MEBIBYTE, device=device)
    torch.ones(100 * MEBIBYTE, device=device)
    assert peak.bytes is not None
    assert peak.bytes < 100 * MEBIBYTE + torch.accelerator.memory_allocated(device)


@pytest.mark.cuda
def test_a_peak_that_was_settled_does_not_see_what_comes_later(reads):
    peaks, device = on_accelerator(wanted=None)
    with peaks.next() as peak:
        torch.ones(MEBIBYTE, device=device)
    peaks.settle()
    torch.ones(100 * MEBIBYTE, device=device)
    assert peak.bytes is not None
    assert peak.bytes < 100 * MEBIBYTE + torch.accelerator.memory_allocated(device)
    assert len(reads) == 1

"""The peak of a step: the right figure, and no unnecessary reads."""

import weakref

import pytest
import torch

from recoup.backend.memory.meters import AllocatorMeter, StorageMeter
from recoup.train.run_results import Peak, Peaks

MEBIBYTE = 1 << 20


def test_a_peak_read_at_the_end_of_its_step_excludes_later_memory():
    with Peak(StorageMeter(), at_once=True) as peak:
        ones = torch.ones(100)
    more = torch.ones(1000)
    assert peak.bytes == 4 * ones.numel() < 4 * more.numel()


def test_without_a_meter_there_is_no_figure():
    peaks = Peaks(torch.device("cpu"), wanted=None, existing=tuple)
    with peaks.next() as peak:
        torch.ones(100)
    assert peak.bytes is None


def test_tensors_from_before_the_step_count():
    weight = torch.ones(1000)
    peaks = Peaks(torch.device("cpu"), wanted=True, existing=lambda: [weight])
    with peaks.next() as peak:
        ones = torch.ones(100)
    assert peak.bytes == 4 * (weight.numel() + ones.numel())


def test_a_known_peak_keeps_no_meter():
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
def test_the_allocator_is_read_only_on_access(reads):
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
def test_a_referenced_result_keeps_its_own_peak():
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
def test_measure_memory_gives_the_peak_of_the_step_alone():
    peaks, device = on_accelerator(wanted=True)
    with peaks.next() as peak:
        torch.ones(MEBIBYTE, device=device)
    torch.ones(100 * MEBIBYTE, device=device)
    assert peak.bytes is not None
    assert peak.bytes < 100 * MEBIBYTE + torch.accelerator.memory_allocated(device)


@pytest.mark.cuda
def test_a_settled_peak_excludes_later_memory(reads):
    peaks, device = on_accelerator(wanted=None)
    with peaks.next() as peak:
        torch.ones(MEBIBYTE, device=device)
    peaks.settle()
    torch.ones(100 * MEBIBYTE, device=device)
    assert peak.bytes is not None
    assert peak.bytes < 100 * MEBIBYTE + torch.accelerator.memory_allocated(device)
    assert len(reads) == 1

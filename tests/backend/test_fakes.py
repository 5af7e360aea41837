"""Stand-ins without memory: they lie as their originals do, and leave nothing."""

import logging

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from recoup.backend.operators.fakes import FakeMeter, Shadows, without_memory
from recoup.errors import UnsupportedError

CPU = torch.device("cpu")


class Odd(nn.Module):
    """Has tensors in every place that a module may have them in."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tied = self.linear.weight
        self.register_buffer("counts", torch.zeros(4, dtype=torch.int64))
        self.plain = torch.ones(4)
        self.several = [torch.ones(2), torch.ones(3)]

    def forward(self, x):
        self.counts += 1
        self.cached = x * self.plain
        return self.linear(self.cached) @ self.tied


def test_a_model_has_its_own_tensors_again_and_nothing_that_a_step_added():
    model = Odd()
    before = {id(m): dict(m.__dict__) for m in model.modules()}
    values = {name: value.clone() for name, value in model.state_dict().items()}
    shadows = Shadows(CPU)
    x = shadows.of(torch.ones(2, 4))
    with shadows.instead_of(model), shadows.mode:
        for tensor in (*model.parameters(), *model.buffers()):
            assert tensor.untyped_storage().device.type == "meta"
        assert model.tied is model.linear.weight
        assert isinstance(model.linear.weight, nn.Parameter)
        assert isinstance(model.plain, type(model.counts))
        assert isinstance(model.several[1], type(model.counts))
        model(x).sum().backward()
        assert model.linear.weight.grad is not None
    assert {id(m): dict(m.__dict__) for m in model.modules()} == before
    assert all(torch.equal(values[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_model_has_its_own_tensors_again_after_an_error():
    model = Odd()
    weight = model.linear.weight
    with pytest.raises(ZeroDivisionError), Shadows(CPU).instead_of(model):
        raise ZeroDivisionError
    assert model.linear.weight is weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_stand_ins_lie_as_their_originals_and_share_as_they_do(device):
    whole = torch.empty(6, 8, device=device)
    part = whole.T[2:5, ::2]
    shadows = Shadows(CPU)
    first, second = shadows.of(part), shadows.of(whole)
    assert first is shadows.of(part)
    assert first.device == second.device == CPU
    assert (first.shape, first.stride()) == (part.shape, part.stride())
    assert first.storage_offset() == part.storage_offset()
    assert first.untyped_storage() is second.untyped_storage()
    assert second.untyped_storage().nbytes() == whole.nbytes


def test_a_tensor_that_is_more_than_a_storage_has_no_stand_in():
    with pytest.raises(UnsupportedError, match="leave out dry"):
        Shadows(CPU).of(torch.eye(3).to_sparse())


def test_the_meter_counts_bytes_that_nobody_allocates():
    shadows = Shadows(CPU)
    start = shadows.of(torch.empty(1 << 20, device="meta"))
    with shadows.mode, FakeMeter() as meter:
        meter.track(start)
        doubled = start + start
        torch.empty(1 << 30, device="meta")
        assert meter.live_bytes == 2 * start.nbytes
        del doubled
        assert (meter.live_bytes, meter.peak_bytes) == (start.nbytes, 2 * start.nbytes)


def test_the_meter_refuses_what_only_a_kernel_can_size():
    lstm = nn.LSTM(4, 4)
    shadows = Shadows(CPU)
    x = shadows.of(torch.ones(3, 2, 4))
    with (
        shadows.instead_of(lstm),
        shadows.mode,
        FakeMeter(),
        pytest.raises(UnsupportedError, match="where only the kernel knows"),
    ):
        lstm(x)


def test_an_error_without_memory_is_raised_and_not_logged_as_well():
    """Whoever runs the step reports it once; torch's log keeps the errors of others."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    shown: list[logging.LogRecord] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            shown.append(record)

    listening = Listening()
    log.addHandler(listening)
    try:
        with without_memory():
            left = torch.ones(2, 3)
            with pytest.raises(RuntimeError):
                torch.mm(left, left)
        assert shown == []
        with FakeTensorMode():
            left = torch.ones(2, 3)
            with pytest.raises(RuntimeError):
                torch.mm(left, left)
        assert len(shown) == 1
    finally:
        log.removeHandler(listening)

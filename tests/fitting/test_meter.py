"""A meter counts steps, replays and bytes, and tells whoever listens."""

import pytest
import torch
from torch import nn

from recoup import CheckpointScope, Meter, fit
from recoup.errors import UsageError


class Notebook:
    """A writer that remembers."""

    def __init__(self):
        self.entries = []

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.entries.append((tag, scalar_value, global_step))


def test_readings_come_when_they_are_due_and_are_written():
    writer = Notebook()
    meter = Meter("1MiB", device="cpu", every=3, writer=writer)
    losses = [torch.tensor(float(n), requires_grad=True) for n in range(7)]
    readings = [meter.step(loss) for loss in losses]
    due = [number for number, reading in enumerate(readings, 1) if reading is not None]
    assert due == [3, 6]
    tags = [(tag, step) for tag, _, step in writer.entries]
    assert tags == [
        (f"recoup/{name}", step)
        for step in (3, 6)
        for name in ("loss", "seconds", "replay_share")
    ]
    assert writer.entries[0][1] == 2.0


def test_the_share_of_replays_is_none_without_regions_and_some_with():
    x = torch.randn(64, 64, requires_grad=True)
    meter = Meter(device="cpu")
    (x @ x).sum().backward()
    plain = meter.step()
    assert plain is not None
    assert plain.replay_share == 0
    with CheckpointScope("block"):
        out = (x @ x).exp().sin()
    out.sum().backward()
    scoped = meter.step()
    assert scoped is not None
    assert 0 < scoped.replay_share < 1


def test_the_budget_is_that_of_fit():
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in "abcd")
    )
    _, fitted = fit(model, torch.ones(64, 8), 0.9, loss=torch.sum)
    reading = Meter(fitted, device="cpu").step(0.5)
    assert reading is not None
    assert reading.budget_bytes == fitted.budget_bytes
    assert reading.peak_bytes is None


@pytest.mark.parametrize(
    "wrong", [{"budget": 0.5}, {"budget": "8 bananas"}, {"every": 0}]
)
def test_a_meter_that_cannot_be_is_refused(wrong):
    with pytest.raises(UsageError):
        Meter(**wrong)


@pytest.mark.cuda
def test_on_an_accelerator_the_peak_is_that_of_the_steps_since():
    meter = Meter("1GiB")
    torch.empty(2**20, dtype=torch.uint8, device="cuda")
    large, later = meter.step(), meter.step()
    assert large is not None
    assert later is not None
    assert large.peak_bytes is not None
    assert later.peak_bytes is not None
    assert large.peak_bytes - later.peak_bytes >= 2**20


def test_tensorboard_takes_the_scalars(tmp_path):
    pytest.importorskip("tensorboard", reason="the scalars are optional")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        Meter(device="cpu", writer=writer).step(1.0)
    assert list(tmp_path.iterdir())

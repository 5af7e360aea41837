"""What recoup allocates does not depend on torch's default device."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import recoup
from recoup.measurement.timing.host_cost import least_recording_seconds
from recoup.tiers import Disk, Host, Packed
from recoup.train.saving.snapshot import read_snapshot, write_snapshot

CPU = torch.device("cpu")
WIDTH = 64


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4))
    return nn.Sequential(*layers).to(CPU), torch.randn(2048, WIDTH, device=CPU)


def gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(batch).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) > 0 and all(map(torch.equal, found, wanted))


@pytest.fixture
def elsewhere() -> Any:
    """Make tensors on a device that has no memory unless another one is named."""
    return functools.partial(torch.device, "meta")


STORES = {"host": Host(0), "disk": Disk(), "packed": Packed()}


@pytest.mark.parametrize("name", STORES)
def test_stored_values_are_where_they_can_be_read(name, elsewhere):
    model, batch = model_and_batch()
    wanted = gradients(model, batch)
    for layer in model.children():
        recoup.checkpoint_module(layer, store=STORES[name], verify="full")
    with elsewhere():
        assert same(gradients(model, batch), wanted)


def test_a_fit_is_measured_and_trains_on_the_device_of_the_model(elsewhere):
    model, batch = model_and_batch()
    wanted = gradients(model, batch)
    with elsewhere():
        _, report = recoup.fit(model, batch, 0.9, loss=torch.sum)
        assert same(gradients(model, batch), wanted)
    assert report.measured_peak_bytes <= report.budget_bytes
    report.remove()


def test_compiled_blocks_are_fitted_on_the_device_of_the_model(elsewhere):
    model, batch = model_and_batch()
    wanted = gradients(model, batch)
    with elsewhere():
        _, report = recoup.fit(model, batch, 0.9, loss=torch.sum, compile="exact")
        assert same(gradients(model, batch), wanted)
    report.remove()


def test_recording_is_timed(elsewhere):
    with elsewhere():
        assert least_recording_seconds() >= 0


def test_snapshots_are_read_into_memory(tmp_path, elsewhere):
    tensor = torch.arange(8.0)
    with elsewhere():
        write_snapshot(tmp_path / "run", {"weight": tensor})
        found = read_snapshot(tmp_path / "run")
    assert torch.equal(found["weight"], tensor)


def test_a_trainer_trains_as_without_it(elsewhere):
    trained = []
    for context in (functools.partial(torch.device, "cpu"), elsewhere):
        model, batch = model_and_batch()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trainer = recoup.Trainer(model, optimizer, loss_fn=functional.mse_loss)
        with context():
            trainer.fit([(batch, batch.sin())] * 2, epochs=1)
        trained.append([p.detach().clone() for p in model.parameters()])
    assert same(*trained)

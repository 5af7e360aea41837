"""Snapshots of a step: every generator, every buffer, nothing else."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from recoup.backend.state.rng import (
    RandomStates,
    random_states,
    restore_random_states,
)
from recoup.backend.state.snapshots import StateSnapshot
from tests.support.bits import tree_differences


def draw():
    return (
        torch.rand(3),
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),  # noqa: NPY002
        np.random.standard_normal(),  # noqa: NPY002
    )


def test_every_global_generator_is_put_back(device):
    draw()
    states = random_states(device)
    on_device = torch.rand(3, device=device)
    restore_random_states(states, device)
    states = random_states(device)
    first = draw()
    restore_random_states(states, device)
    assert list(tree_differences(first, draw(), where="")) == []
    restore_random_states(states, device)
    assert torch.equal(on_device, torch.rand(3, device=device))
    restore_random_states(RandomStates.of_plain(states.plain()), device)
    torch.rand(3, device=device)
    restore_random_states(RandomStates.of_plain(states.plain()), device)
    assert list(tree_differences(first, draw(), where="")) == []


def test_buffers_of_every_type_are_put_back_and_parameters_are_not(device):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).to(device)
    snapshot = StateSnapshot(model, devices=[device], with_numpy=False)
    for shift in (1.0, 5.0):
        model(torch.randn(8, 3, device=device) + shift)
        before = [buffer.clone() for buffer in model.buffers()]
        snapshot.take()
        model(torch.randn(8, 3, device=device) - 7)
        assert not all(map(torch.equal, model.buffers(), before))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(shift)
        snapshot.restore()
        assert all(map(torch.equal, model.buffers(), before))
        assert all((parameter == shift).all() for parameter in model.parameters())


@pytest.mark.parametrize("bad", [False, True])
def test_a_device_puts_buffers_back_by_a_flag_of_its_own(device, bad):
    model = nn.BatchNorm1d(3).to(device)
    snapshot = StateSnapshot(model, devices=[device], with_numpy=False)
    before = [buffer.clone() for buffer in model.buffers()]
    snapshot.take()
    inputs = torch.full((8, 3), torch.inf if bad else 2.0, device=device)
    model(inputs)
    after = [buffer.clone() for buffer in model.buffers()]
    assert snapshot.can_restore_on(
        device if device.index is not None else inputs.device
    )
    snapshot.buffers.restore_if(torch.tensor([bad], device=device))
    expected = before if bad else after
    assert all(map(torch.equal, model.buffers(), expected))
    torch.rand(1, device=device)
    assert not snapshot.can_restore_on(inputs.device)


def test_a_buffer_that_came_later_is_remembered_too():
    model = nn.BatchNorm1d(2)
    snapshot = StateSnapshot(model)
    snapshot.take()
    late = torch.ones(2)
    model.register_buffer("late", late)
    snapshot.take()
    late.zero_()
    snapshot.restore()
    assert late.tolist() == [1.0, 1.0]


def test_buffers_that_were_replaced_are_put_back():
    model = nn.BatchNorm1d(3)
    snapshot = StateSnapshot(model)
    for _ in range(2):
        before = dict(model.named_buffers())
        contents = {name: buffer.clone() for name, buffer in before.items()}
        snapshot.take()
        model.running_mean = torch.ones(3)
        assert not snapshot.can_restore_on(torch.device("cpu"))
        snapshot.restore()
        assert dict(model.named_buffers()) == before
        assert all(torch.equal(before[name], contents[name]) for name in before)
        model.running_mean = torch.zeros(3)

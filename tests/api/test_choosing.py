"""What a manager chooses for one model: the fastest way that fits, or the smallest."""

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.api.choosing import way_within
from recoup.api.managed import KEEP
from recoup.planners.plan import floor


@pytest.fixture(scope="module")
def graph():
    layers = [nn.Sequential(nn.Linear(8, 32), nn.Tanh()), nn.Linear(32, 8), nn.Tanh()]
    model = nn.Sequential(*layers)
    return recoup.measure(model, torch.ones(64, 8), loss=Tensor.sum)


def test_what_fits_as_it_is_stays_as_it_is(graph):
    assert way_within(graph, 1 << 40).segments == ()


@pytest.mark.parametrize("budget_bytes", [1, 0, -1, -(1 << 40)])
def test_what_does_not_fit_runs_in_the_least_it_can(graph, budget_bytes):
    smallest = floor(graph, allow=KEEP).segments
    assert way_within(graph, budget_bytes).segments == smallest

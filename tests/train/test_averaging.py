"""The average of parameters follows its formula and comes off again."""

import pytest
import torch
from torch import nn

from recoup import ParameterAverage, UsageError


def test_it_is_the_exponential_average():
    layer = nn.Linear(3, 2)
    frozen = nn.Linear(2, 2).requires_grad_(requires_grad=False)
    model = nn.Sequential(layer, frozen)
    average = ParameterAverage(model, decay=0.9)
    expected = [parameter.detach().clone() for parameter in layer.parameters()]
    for _ in range(5):
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(torch.randn_like(parameter))
        average.update()
        for mean, parameter in zip(expected, layer.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)
    assert list(average.parameters) == ["0.weight", "0.bias"]
    assert all(map(torch.equal, average.parameters.values(), expected))


def test_it_is_applied_inside_the_block_only_and_after_an_error_too():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    average = ParameterAverage(model, decay=0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    moved = [parameter.detach().clone() for parameter in model.parameters()]

    def fail():
        with average.applied():
            assert all(
                map(torch.equal, model.parameters(), average.parameters.values())
            )
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert all(map(torch.equal, model.parameters(), moved))


def test_an_average_of_other_parameters_is_refused():
    average = ParameterAverage(nn.Linear(2, 2), decay=0.5)
    other = ParameterAverage(nn.Linear(2, 2, bias=False), decay=0.5)
    with pytest.raises(UsageError, match="bias"):
        average.load_state_dict(other.state_dict())

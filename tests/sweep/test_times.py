"""Predicted times on a CPU, against the CPU time of real steps in one run."""

import copy
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import recoup

pytestmark = pytest.mark.sweep

TURNS = 9


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                128, 4, 512, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Residual(nn.Module):
    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Residual() for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer": (Attention, (16, 64, 128)),
    "convolutions": (Convolutions, (16, 32, 24, 24)),
}


def least_cpu_seconds(models: list[nn.Module], x: Tensor) -> list[float]:
    """Return the least CPU time of a step of each model, timed in turns."""
    times: list[list[float]] = [[] for _ in models]
    for _ in range(TURNS):
        for model, found in zip(models, times, strict=True):
            model.zero_grad(set_to_none=True)
            begin = time.process_time()
            model(x).backward()
            found.append(time.process_time() - begin)
    return [min(found) for found in times]


@pytest.mark.parametrize("share", [0.8, 0.6])
@pytest.mark.parametrize("name", MODELS)
def test_the_predicted_slowdown_is_measured_within_a_tenth(name, share):
    build, shape = MODELS[name]
    torch.manual_seed(0)
    plain = build()
    model, x = copy.deepcopy(plain), torch.randn(shape)
    _, report = recoup.fit(model, x, share)
    fitted_seconds, plain_seconds = least_cpu_seconds([model, plain], x)
    measured = fitted_seconds / plain_seconds
    predicted = report.predicted_seconds / report.plain_seconds
    assert abs(predicted / measured - 1) <= 0.1, (predicted, measured)

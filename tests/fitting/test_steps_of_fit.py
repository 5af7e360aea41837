"""Every step that `fit` runs with a plan is within the budget, also while it verifies.

A slice; tests/sweep/test_loops.py states it for every loop.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from recoup.errors import InfeasibleError
from tests.support.steps_of_fit import fit_metered, missing_bytes
from tests.support.training_loops import Transformer, build


def images() -> nn.Module:
    def block(before: int, after: int) -> nn.Module:
        convolution = nn.Conv2d(before, after, 3, padding=1)
        return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU())

    blocks = block(3, 16), block(16, 16), block(16, 32), block(32, 32)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    return nn.Sequential(*blocks, *head)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "images": (images, (8, 3, 32, 32)),
    "transformer": (Transformer, (16, 40, 16)),
}


def step_of(name: str) -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    make, shape = CASES[name]
    model = make()

    def run() -> None:
        x = torch.randn(shape)
        output: Tensor = model(x)
        output.square().mean().backward()

    return model, run


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("share", [0.8, 0.61])
def test_no_step_with_a_plan_exceeds_the_budget(name, share):
    model, run = step_of(name)
    report, peaks = fit_metered([model], run, share)
    report.remove()
    assert len(peaks) >= 2  # one is verified, one is measured
    assert max(peaks) <= report.budget_bytes + missing_bytes(report)


def test_near_the_floor_verification_takes_the_least_it_can():
    model, run = step_of("images")
    with pytest.raises(InfeasibleError) as caught:
        fit_metered([model], run, 1)
    floor_bytes = caught.value.floor_bytes
    report, peaks = fit_metered([model], run, floor_bytes)
    report.remove()
    least_bytes = missing_bytes(report)
    assert 0 < least_bytes < 0.005 * floor_bytes
    assert max(peaks) <= floor_bytes + least_bytes


@pytest.mark.parametrize("kind", ["accumulation", "GAN", "contrastive"])
def test_several_passes_and_models_stay_within_it_as_well(kind):
    loop = build(kind, "conv and BatchNorm")
    report, peaks = fit_metered(loop.models, loop.step, 0.85)
    report.remove()
    assert max(peaks) <= report.budget_bytes + missing_bytes(report)

"""The floor: what one process is told, another one reaches."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import recoup
from benchmarks.zoo.cases import CASES
from recoup.backend.memory.meters import StorageMeter
from recoup.errors import InfeasibleError
from recoup.measurement.steps import floor as measured_floor
from tests.support.fitting import outcome_of
from tests.support.floors import floor_of, floors_elsewhere

NAMES = ["u-net", "lstm"]
"""A slice; tests/sweep/test_fit.py has them all."""


@pytest.fixture(scope="module")
def elsewhere() -> dict[str, tuple[int, str]]:
    return floors_elsewhere(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_find_the_same_floor_and_the_same_plan_there(name, elsewhere):
    assert floor_of(name) == elsewhere[name]


@pytest.mark.parametrize("name", NAMES)
def test_the_floor_that_another_process_told_is_reached(name, elsewhere):
    found = outcome_of(CASES[name], elsewhere[name][0])
    assert found.fits
    assert found.peak_bytes <= found.budget_bytes
    assert found.differences == ()
    assert found.left_behind == ()


def test_below_the_floor_the_error_names_a_budget_that_is_met(elsewhere):
    refused = outcome_of(CASES["lstm"], elsewhere["lstm"][0] // 2)
    assert not refused.fits
    assert refused.floor_bytes <= elsewhere["lstm"][0]
    assert outcome_of(CASES["lstm"], refused.floor_bytes).fits


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def layer(kind: str, width: int) -> nn.Module:
    if kind == "mlp":
        wide = nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)
        return Residual(nn.LayerNorm(width), *wide)
    if kind == "statistics":
        return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())
    if kind == "random":
        return Residual(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.3))
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True))


QUICK = [phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)]

KINDS = st.lists(
    st.sampled_from(["mlp", "statistics", "random", "in place"]),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("block_bytes", [1, 512])
@settings(max_examples=15, phases=QUICK)
@given(kinds=KINDS, width=st.integers(3, 40), rows=st.integers(2, 70))
def test_the_budget_that_an_error_tells_is_met(block_bytes, kinds, width, rows):
    """By a meter that counts bytes, and by one that rounds as allocators do."""

    def meter(_: object) -> StorageMeter:
        return StorageMeter(block_bytes=block_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_floor, "device_meter", meter)
        model = nn.Sequential(*(layer(kind, width) for kind in kinds))
        batch = torch.ones(rows, width)
        with pytest.raises(InfeasibleError) as caught:
            recoup.fit(model, batch, 1, loss=Tensor.sum)
        told_bytes = caught.value.floor_bytes
        _, report = recoup.fit(model, batch, told_bytes, loss=Tensor.sum)
        report.remove()
    assert report.measured_peak_bytes <= told_bytes

"""A budget in the settings: steps stay below it, bitwise equal to the plain run."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import recoup
from recoup import Trainer, TrainerSettings
from recoup.errors import InfeasibleError, UsageError
from tests.support.training import samples
from tests.support.twin import leftovers


class Deep(nn.Module):
    """Activations far larger than parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(4, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4)
            )
            for _ in range(6)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x[:, :3]


def run(*, steps=3, count=600, **settings):
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = Trainer(
        model,
        optimizer,
        TrainerSettings(**{"measure_memory": True, **settings}),
        functional.cross_entropy,
    )
    results = [trainer.step(samples(count, seed=step)) for step in range(steps)]
    return trainer, results


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_blocks_train_within_the_budget_with_the_same_bits():
    plain, free = run()
    budget = int(0.75 * max(result.peak_bytes or 0 for result in free))
    fitted, tight = run(budget=budget, compile="exact", measure_memory=None)
    report = fitted.fitted
    assert isinstance(report, recoup.results.CompiledFit)
    assert len(report.plan.blocks) == 6
    assert report.measured_peak_bytes <= report.budget_bytes == budget
    assert [r.loss for r in tight] == [r.loss for r in free]
    pairs = plain.model.parameters(), fitted.model.parameters()
    assert all(map(torch.equal, *pairs))
    fitted.release()
    assert list(leftovers()) == []
    with pytest.raises(UsageError, match="show no operators"):
        run(budget=budget, compile="exact")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_step_stays_under_the_budget_with_the_same_bits(precision):
    options = {"precision": precision, "initial_loss_scale": 1024.0}
    plain, free = run(**options)
    budget = int(0.7 * max(result.peak_bytes or 0 for result in free))
    fitted, tight = run(**options, budget=budget)
    assert fitted.fitted is not None
    assert fitted.fitted.budget_bytes == budget
    assert all(0 < (result.peak_bytes or 0) <= budget for result in tight)
    assert [r.loss for r in tight] == [r.loss for r in free]
    pairs = plain.model.parameters(), fitted.model.parameters()
    assert all(map(torch.equal, *pairs))
    fitted.release()
    assert fitted.fitted is None
    assert list(leftovers()) == []


def test_a_budget_below_the_floor_is_refused_before_any_change():
    with pytest.raises(InfeasibleError) as caught:
        run(budget="20KiB")
    assert caught.value.floor_bytes > 20 * 1024


def test_a_batch_of_another_size_is_trained_as_well():
    free, _ = run()
    trainer, _ = run(budget="600KB")
    for each in (free, trainer):
        torch.manual_seed(1)
        each.step(samples(50, seed=9))
    pairs = free.model.parameters(), trainer.model.parameters()
    assert all(map(torch.equal, *pairs))

"""The four-row table: each configuration saves memory, and state is restored."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from recoup import Trainer, TrainerSettings
from recoup.checkpointing import is_checkpointed
from recoup.errors import UsageError
from recoup.train import compare_configurations
from tests.support.bits import tree_differences
from tests.support.training import Classifier, samples
from tests.support.twin import leftovers


def table(model, optimizer=None, **options):
    return compare_configurations(
        model,
        samples(256),
        optimizer=optimizer,
        loss_fn=functional.cross_entropy,
        repeats=1,
        **options,
    )


def test_checkpointing_takes_less_memory_in_both_precisions():
    found = table(Classifier(32, norm=True))
    full, mixed, checkpointed, both = (row.peak_bytes or 0 for row in found.rows)
    assert 0 < checkpointed < full
    assert both < mixed
    assert found.precision == "bf16"
    assert all(row.seconds for row in found.rows)


def test_regions_are_verified_once_not_at_every_step():
    # Under autocast the first block casts its input, the others do not have to.
    model = nn.Sequential(
        nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)),
        nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)),
        nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 3)),
    )
    batch = torch.randn(512, 16), torch.randint(3, (512,))
    peaks = []
    for recompute in (False, True):
        settings = TrainerSettings(
            precision="bf16", use_gradient_checkpointing=recompute, measure_memory=True
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model, optimizer, settings, functional.cross_entropy)
        peaks.append([trainer.step(batch).peak_bytes or 0 for _ in range(4)])
    # The first two steps may verify; fingerprints take more than is saved here.
    assert max(peaks[1][2:]) < min(peaks[0])


def test_all_state_is_restored():
    model = Classifier(8, norm=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(samples(8)[0]).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]

    def state():
        return copy.deepcopy(
            [model.state_dict(), optimizer.state_dict(), torch.get_rng_state()]
        )

    for _ in range(2):
        before = state()
        table(model, optimizer)
        assert list(tree_differences(before, state(), where="")) == []
        kept = zip(gradients, model.parameters(), strict=True)
        assert all(gradient is p.grad for gradient, p in kept)
        optimizer.step()
    assert not any(is_checkpointed(module) for module in model.modules())
    assert list(leftovers()) == []


def test_the_text_has_a_line_with_the_share_of_each_configuration():
    lines = str(table(Classifier(8), precision="fp16")).splitlines()
    assert len(lines) == 5
    assert lines[1].startswith("Baseline (FP32)")
    assert lines[1].count("100%") == 2
    assert lines[4].startswith("Both")


class Hungry(nn.Module):
    """Runs out of memory in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Classifier(8)

    def forward(self, x):
        if not torch.is_autocast_enabled("cpu"):
            raise torch.OutOfMemoryError("too much")
        return self.inner(x)


def test_a_configuration_that_does_not_fit_has_no_numbers():
    found = table(Hungry())
    fits = [row.peak_bytes is not None for row in found.rows]
    assert fits == [False, True, False, True]
    assert str(found).count("out of memory") == 2


def test_segments_are_measured_where_blocks_are_recomputed():
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(36))
    model = nn.Sequential(*layers, nn.Linear(4, 3))
    peaks = {
        size: [
            row.peak_bytes or 0
            for row in table(model, checkpoint_segment_size=size).rows
        ]
        for size in (None, 2, 6, 18)
    }
    plain, blocks = peaks[None][0], peaks[None][2]
    assert [found[0] for found in peaks.values()] == [plain] * 4
    # Such layers save no more than their inputs, which regions of one layer hold too.
    assert blocks == plain
    # 18 inputs and 2 layers, 6 and 6, 2 and 18.
    assert peaks[6][2] < min(peaks[2][2], peaks[18][2])
    assert max(peaks[2][2], peaks[18][2]) < blocks
    assert not any(is_checkpointed(module) for module in model.modules())


@pytest.mark.parametrize("size", [0, 1.5, True])
def test_an_invalid_segment_size_is_refused_before_measuring(size):
    class Never(Classifier):
        def forward(self, x):
            raise AssertionError("measured")

    with pytest.raises(UsageError, match="at least 1"):
        table(Never(), checkpoint_segment_size=size)


def test_full_precision_is_not_compared_with_itself():
    with pytest.raises(UsageError, match="full precision"):
        table(Classifier(8), precision="fp32")

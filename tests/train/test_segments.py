"""The segment size of the trainer: blocks share a region, and no bit changes."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from recoup import CheckpointProfiler, Trainer, TrainerSettings, checkpoint_module
from recoup.checkpointing import is_checkpointed
from recoup.errors import UsageError
from recoup.train.saving.snapshot import read_snapshot
from tests.support.bits import tree_differences
from tests.support.training import (
    Ceiling,
    Classifier,
    batches,
    make_trainer,
    remains,
    seeded,
)
from tests.support.twin import leftovers
from tests.support.watching import Replayed

SEGMENTS = {"use_gradient_checkpointing": True, "checkpoint_segment_size": 2}
UNLIMITED = 1 << 60


class Deep(nn.Module):
    """A stem, many layers with BatchNorm and dropout, and a head."""

    def __init__(self, layers: int, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, width),
                nn.BatchNorm1d(width),
                nn.Tanh(),
                nn.Dropout(0.2),
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def deep_trainer(layers: int, **settings) -> Trainer:
    torch.manual_seed(0)
    model = Deep(layers).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = TrainerSettings(**settings)
    return Trainer(model, optimizer, settings, functional.cross_entropy)


def double_batches(count):
    return [(inputs.double(), targets) for inputs, targets in batches(count)]


def regions_of(run) -> int:
    with CheckpointProfiler() as profiler:
        run()
    return profiler.checkpoint_count()


@pytest.mark.parametrize(
    ("layers", "size", "regions"),
    [
        (12, 4, 3),
        (100, 10, 10),
        (10, 4, 3),
        (12, None, 12),
        (12, 1, 12),
        (3, 8, 1),
    ],
)
def test_segments_group_blocks_and_gradients_equal_the_plain_ones(
    layers, size, regions
):
    batch = double_batches(1)[0]
    plain = deep_trainer(layers)
    trainer = deep_trainer(
        layers, use_gradient_checkpointing=True, checkpoint_segment_size=size
    )
    for _ in range(2):
        found = []
        for each in (plain, trainer):
            with seeded(1):
                found.append(regions_of(lambda each=each: each.step(batch)))
        assert found == [0, regions]
        assert not list(tree_differences(remains(plain), remains(trainer), where=""))
    trainer.release()
    assert regions_of(lambda: trainer.step(batch)) == 0
    assert not any(is_checkpointed(module) for module in trainer.model.modules())
    assert list(leftovers()) == []


def test_each_layer_is_computed_once_more_at_any_size():
    batch, counts = double_batches(1)[0], []
    for size in (None, 3, 12):
        trainer = deep_trainer(
            12, use_gradient_checkpointing=True, checkpoint_segment_size=size
        )
        trainer.step(batch)
        with Replayed() as replayed:
            trainer.step(batch)
        counts.append(replayed.operators["native_batch_norm"])
    assert max(counts) <= 12
    assert min(counts) > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("norm", [False, True], ids=["layer norm", "batch norm"])
def test_a_run_with_accumulation_equals_that_of_the_plain_trainer(precision, norm):
    ends = []
    for settings in ({}, SEGMENTS):
        trainer = make_trainer(
            norm=norm,
            precision=precision,
            accumulation_steps=3,
            max_gradient_norm=0.5,
            average_decay=0.9,
            initial_loss_scale=1024.0,
            **settings,
        )
        with seeded(1):
            trainer.fit(batches(9), epochs=2)
        ends.append(remains(trainer))
    assert list(tree_differences(*ends, where="")) == []


@pytest.mark.parametrize(
    "after",
    [SEGMENTS, {"use_gradient_checkpointing": True}, {}],
    ids=["with segments", "with blocks", "with nothing"],
)
@pytest.mark.parametrize(
    "before",
    [SEGMENTS, {"use_gradient_checkpointing": True}],
    ids=["after segments", "after blocks"],
)
def test_a_run_resumes_to_the_same_bits_with_its_settings(tmp_path, before, after):
    data = batches(8)
    whole = make_trainer(norm=True)
    with seeded(1):
        whole.fit(data, epochs=2)
    first = make_trainer(norm=True, **before)
    with seeded(1):
        first.fit(data, epochs=1)
    first.save(tmp_path / "run")
    second = make_trainer(norm=True, seed=5, **after)
    blocks = getattr(second.model, "blocks")  # noqa: B009 (for a type checker)
    had = [is_checkpointed(part) for part in (second.model, *blocks)]
    second.load(tmp_path / "run")
    second.fit(data, epochs=1)
    assert list(tree_differences(remains(whole), remains(second), where="")) == []
    if after:  # a run that has regions keeps those that it was asked for
        assert [is_checkpointed(part) for part in (second.model, *blocks)] == had


def wide_trainer(**settings) -> Trainer:
    torch.manual_seed(0)
    model = Classifier(32, dropout=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = TrainerSettings(**settings)
    return Trainer(model, optimizer, settings, functional.cross_entropy)


def test_a_step_that_does_not_fit_gives_the_segments_up(tmp_path, caplog):
    batch = batches(1, 512)[0]
    size = {"use_gradient_checkpointing": True, "checkpoint_segment_size": 3}
    peaks = []
    for settings in (size, {"use_gradient_checkpointing": True}):
        trainer = wide_trainer(**settings)
        trainer.step(batch)  # which is verified
        with Ceiling(UNLIMITED) as ceiling, seeded(1):
            trainer.step(batch)
        peaks.append(ceiling.peak_bytes)
        expected = remains(trainer)
    segments, blocks = peaks
    assert blocks < segments, "the case shows nothing otherwise"
    trainer = wide_trainer(**size)
    trainer.step(batch)
    # Regions of the blocks are new to it, and verified in the step that is made again.
    with Ceiling((blocks + segments) // 2) as ceiling, seeded(1):
        result = trainer.step(batch)
    assert ceiling.raised >= 1
    assert result.stepped
    if result.parts == 1:
        assert list(tree_differences(expected, remains(trainer), where="")) == []
    model = trainer.model
    assert isinstance(model, Classifier)
    assert not is_checkpointed(model)
    assert all(is_checkpointed(block) for block in model.blocks)
    assert "every block is recomputed in backward on its own" in caplog.text
    trainer.save(tmp_path / "run")
    assert read_snapshot(tmp_path / "run")["gave_up_segments"] is True
    other = wide_trainer(**size)
    other.load(tmp_path / "run")
    assert isinstance(other.model, Classifier)
    assert not is_checkpointed(other.model)
    assert all(is_checkpointed(block) for block in other.model.blocks)
    other.release()
    assert not any(is_checkpointed(block) for block in other.model.modules())


def test_a_model_without_a_chain_of_blocks_is_refused():
    for model in (
        nn.Sequential(nn.Linear(4, 3)),
        nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 3)),
    ):
        with pytest.raises(
            UsageError, match="blocks for checkpoint_segment_size=2, got"
        ):
            Trainer(
                model,
                torch.optim.SGD(model.parameters()),
                TrainerSettings(**SEGMENTS),
            )
        assert not any(is_checkpointed(part) for part in model.modules())


def test_a_model_with_segments_or_regions_is_refused_further_ones():
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters())
    checkpoint_module(model, segment_size=2)
    with pytest.raises(UsageError, match="already"):
        Trainer(model, optimizer, TrainerSettings(**SEGMENTS))

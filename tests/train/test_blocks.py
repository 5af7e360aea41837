"""Repeated blocks get regions once, and lose them again."""

import pytest
import torch
from torch import nn

from recoup.checkpointing import is_checkpointed
from recoup.train.budgeting.block_regions import checkpoint_blocks, uncheckpoint_blocks
from tests.support.models import Residual


def stages() -> nn.Module:
    """A ResNet's shape: sequences of blocks in a sequence."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()),
        nn.Sequential(Residual(4), Residual(4)),
        nn.Sequential(Residual(4), Residual(4), Residual(4)),
    )


def test_regions_are_applied_once_and_removed():
    model = stages()
    blocks = checkpoint_blocks(model)
    assert [type(block) for block in blocks].count(Residual) == 5
    assert checkpoint_blocks(model) == []
    uncheckpoint_blocks(blocks)
    assert not any(is_checkpointed(block) for block in model.modules())
    model(torch.randn(1, 3, 8, 8))


class Classifier(nn.Module):
    """A stem and a head around layers, each made of parts, all of them sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Sequential(nn.Flatten(), nn.LazyLinear(2))


@pytest.mark.parametrize("make", [stages, Classifier])
def test_only_repeated_leaves_out_blocks_that_occur_once(make):
    model = make()
    repeated = checkpoint_blocks(model, only_repeated=True)
    rest = checkpoint_blocks(model)
    assert len(repeated) == (5 if make is stages else 3)
    assert len(rest) == (1 if make is stages else 2)


def test_a_model_without_repeated_blocks_has_all_its_parts_recomputed():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), Residual(4))
    assert len(checkpoint_blocks(model, only_repeated=True)) == 2


def test_a_block_that_is_used_twice_gets_one_region():
    block = Residual(4)
    assert checkpoint_blocks(nn.Sequential(block, block, Residual(4))).count(block) == 1


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
    ],
    ids=["layer", "layers"],
)
def test_single_layers_get_no_region(model):
    assert checkpoint_blocks(model) == []

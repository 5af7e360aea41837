"""Blocks get regions where models repeat themselves, once, and lose them again."""

import pytest
import torch
from torch import nn

from recoup import is_checkpointed
from recoup.train.blocks import checkpoint_blocks, uncheckpoint_blocks
from tests.support.models import Residual


def stages() -> nn.Module:
    """A ResNet's shape: sequences of blocks in a sequence."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()),
        nn.Sequential(Residual(4), Residual(4)),
        nn.Sequential(Residual(4), Residual(4), Residual(4)),
    )


def test_regions_are_put_on_once_and_taken_off_again():
    model = stages()
    blocks = checkpoint_blocks(model)
    assert [type(block) for block in blocks].count(Residual) == 5
    assert checkpoint_blocks(model) == []
    uncheckpoint_blocks(blocks)
    assert not any(is_checkpointed(block) for block in model.modules())
    model(torch.randn(1, 3, 8, 8))


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
def test_single_layers_get_none(model):
    assert checkpoint_blocks(model) == []

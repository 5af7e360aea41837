"""Blocks are found where models repeat themselves."""

import pytest
import torch
from torch import nn

from recoup import is_checkpointed
from recoup.train.blocks import checkpoint_blocks, find_blocks, uncheckpoint_blocks
from tests.support.models import Residual


def stages() -> nn.Module:
    """A ResNet's shape: sequences of blocks in a sequence."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()),
        nn.Sequential(Residual(4), Residual(4)),
        nn.Sequential(Residual(4), Residual(4), Residual(4)),
    )


def test_blocks_in_stages_are_found():
    assert [type(block) for block in find_blocks(stages())] == [Residual] * 5


def test_layers_of_torchs_transformer_are_found():
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    model = nn.Sequential(nn.Embedding(3, 8), nn.TransformerEncoder(layer, 4))
    assert len(find_blocks(model)) == 4


def test_a_block_that_is_used_twice_is_found_once():
    block, other = Residual(4), Residual(4)
    assert find_blocks(nn.ModuleList([block, block, other])) == [block, other]


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
        nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]),
    ],
    ids=["layer", "layers", "list of layers"],
)
def test_single_layers_are_no_blocks(model):
    assert find_blocks(model) == []


def test_regions_are_put_on_once_and_taken_off_again():
    model = stages()
    blocks = checkpoint_blocks(model)
    assert len(blocks) == 5
    assert checkpoint_blocks(model) == []
    uncheckpoint_blocks(blocks)
    assert not any(is_checkpointed(block) for block in blocks)
    model(torch.randn(1, 3, 8, 8))

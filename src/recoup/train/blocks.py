"""Regions around every block of a model, put on and taken off."""

from torch import nn

from recoup.engine.module import (
    checkpoint_module,
    is_checkpointed,
    uncheckpoint_module,
)
from recoup.measure.blocks import block_names


def checkpoint_blocks(model: nn.Module) -> list[nn.Module]:
    """Put a region around every block that has none; return those that got one.

    Blocks are what `fit` would cut the model between, single layers excepted: a region
    around one of these saves nothing. Costs one more forward of the blocks in
    backward; saves what they would keep.

    Examples:
        >>> layers = [nn.TransformerEncoderLayer(8, 2) for _ in range(3)]
        >>> blocks = checkpoint_blocks(nn.Sequential(nn.Linear(4, 8), *layers))
        >>> len(blocks)
        3
        >>> uncheckpoint_blocks(blocks)
    """
    blocks: dict[nn.Module, str] = {}
    for name in block_names(model):
        block = model.get_submodule(name)
        if any(True for _ in block.children()) and not is_checkpointed(block):
            blocks.setdefault(block, name)
    for block, name in blocks.items():
        # A name each: regions of one name with different operators, such as the first
        # block's cast of its input, would be verified anew at every step.
        checkpoint_module(block, name=name or type(block).__name__)
    return list(blocks)


def uncheckpoint_blocks(blocks: list[nn.Module]) -> None:
    """Take the regions off again."""
    for block in blocks:
        uncheckpoint_module(block)

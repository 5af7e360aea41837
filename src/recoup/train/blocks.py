"""Regions around every block of a model, put on and taken off."""

from collections import Counter
from collections.abc import Hashable

from torch import nn

from recoup.engine.module import (
    checkpoint_module,
    is_checkpointed,
    uncheckpoint_module,
)
from recoup.measure.blocks import block_names

_SEQUENCES = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def checkpoint_blocks(
    model: nn.Module, *, only_repeated: bool = False
) -> list[nn.Module]:
    """Put a region around every block that has none; return those that got one.

    Blocks are what `fit` would cut the model between, single layers excepted: a region
    around one of these saves nothing. Costs one more forward of the blocks in
    backward; saves what they would keep.

    Args:
        model: The model.
        only_repeated: Leave out what comes once, such as a stem, an embedding or a
            head, where the model has blocks that come several times.

    Examples:
        >>> layers = [nn.TransformerEncoderLayer(8, 2) for _ in range(3)]
        >>> blocks = checkpoint_blocks(nn.Sequential(nn.Linear(4, 8), *layers))
        >>> len(blocks)
        3
        >>> uncheckpoint_blocks(blocks)
    """
    found = {
        name: block
        for name in block_names(model)
        if _has_parts(block := model.get_submodule(name))
    }
    if only_repeated:
        found = _repeated(model, found) or found
    blocks: dict[nn.Module, str] = {}
    for name, block in found.items():
        if not is_checkpointed(block):
            blocks.setdefault(block, name)
    for block, name in blocks.items():
        checkpoint_module(block, name=name or type(block).__name__)
    return list(blocks)


def uncheckpoint_blocks(blocks: list[nn.Module]) -> None:
    """Take the regions off again."""
    for block in blocks:
        uncheckpoint_module(block)


def _repeated(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the blocks of which the model has several of a kind."""
    kinds = {name: _kind(model, name) for name in blocks}
    counts = Counter(kinds.values())
    return {name: blocks[name] for name, kind in kinds.items() if counts[kind] > 1}


def _kind(model: nn.Module, name: str) -> Hashable:
    """Return what blocks of a kind have in common.

    That is their class. Sequences of one list are of a kind; elsewhere, where a stem
    and a head may both be sequences, those that are made of the same.
    """
    block = model.get_submodule(name)
    if type(block) not in _SEQUENCES:
        return type(block)
    around = name.rpartition(".")[0]
    if type(model.get_submodule(around)) in _SEQUENCES:
        return around
    return around, *map(type, block.children())


def _has_parts(module: nn.Module) -> bool:
    return any(True for _ in module.children())

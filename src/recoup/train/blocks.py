"""The repeated blocks of a model, and regions around them."""

from collections import Counter

from torch import nn

from recoup.engine.module import (
    checkpoint_module,
    is_checkpointed,
    uncheckpoint_module,
)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that a model repeats: layers of a transformer, of a ResNet.

    Blocks are the children of the outermost lists and sequences in which a class of
    modules with parts of its own occurs at least twice.

    Examples:
        >>> layers = [nn.TransformerEncoderLayer(8, 2) for _ in range(3)]
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ModuleList(layers))
        >>> len(find_blocks(model))
        3
    """
    found: list[nn.Module] = []
    _collect(model, found)
    return found


def checkpoint_blocks(model: nn.Module) -> list[nn.Module]:
    """Put a region around every block that has none; return those that got one.

    Costs one more forward of the blocks in backward; saves what they would keep.
    """
    blocks = [block for block in find_blocks(model) if not is_checkpointed(block)]
    for block in blocks:
        checkpoint_module(block)
    return blocks


def uncheckpoint_blocks(blocks: list[nn.Module]) -> None:
    """Take the regions off again."""
    for block in blocks:
        uncheckpoint_module(block)


def _collect(module: nn.Module, found: list[nn.Module]) -> None:
    if not _repeats(module) or any(_repeats(child) for child in module.children()):
        # Not a list of blocks, or one of stages, which hold the blocks.
        for child in module.children():
            _collect(child, found)
        return
    known = {id(block) for block in found}
    found += [child for child in _composite(module) if id(child) not in known]


def _repeats(module: nn.Module) -> bool:
    """Whether this is a list in which a class with parts of its own occurs twice."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    counts = Counter(type(child) for child in _composite(module))
    return max(counts.values(), default=0) > 1


def _composite(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if list(child.children())]

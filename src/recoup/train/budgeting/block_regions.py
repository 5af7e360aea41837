"""Regions around every block of a model, put on and taken off."""

from torch import nn

from recoup.engine.applied.model_blocks import block_names, has_parts, repeated_names
from recoup.engine.scopes.module import (
    checkpoint_module,
    free_blocks,
    is_checkpointed,
    uncheckpoint_module,
)
from recoup.errors import UnsupportedError, UsageError
from recoup.train.processes import is_sharded


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
    names = block_names(model)
    found = [name for name in names if has_parts(model.get_submodule(name))]
    blocks: dict[nn.Module, str] = {}
    for name in repeated_names(model, found) if only_repeated else found:
        block = model.get_submodule(name)
        if not is_checkpointed(block):
            blocks.setdefault(block, name)
    for block, name in blocks.items():
        checkpoint_module(block, name=name or type(block).__name__)
    return list(blocks)


def segment_blocks(model: nn.Module, size: int) -> int:
    """Put regions around a model's repeated blocks, so many in each; return how many.

    Costs what `checkpoint_blocks` costs, and holds one input for each region. Take them
    off with `uncheckpoint_module(model)`.

    Args:
        model: The model.
        size: How many blocks make a region.

    Returns:
        How many blocks there are in these regions.

    Raises:
        UsageError: There are not several blocks.
        UnsupportedError: The model is compiled, or sharded in several units.

    Examples:
        >>> layers = [nn.TransformerEncoderLayer(8, 2) for _ in range(5)]
        >>> model = nn.Sequential(nn.Linear(4, 8), *layers)
        >>> segment_blocks(model, 2)
        5
        >>> _ = uncheckpoint_module(model)
    """
    if any(is_sharded(part) for part in model.modules() if part is not model):
        raise UnsupportedError(
            f"checkpoint_segment_size={size} was set for a model that is sharded in "
            "several units: a region that reaches over some of them would need the "
            "parameters of all when it is replayed. Leave it out, or shard the model "
            "as a whole."
        )
    count = len(free_blocks(model))
    if count < 2:
        raise UsageError(
            f"checkpoint_segment_size={size} recomputes repeated blocks of a model "
            f"together: found {count} without a region in this one. Leave it out, mark "
            "parts with checkpoint_module, or set budget= instead."
        )
    checkpoint_module(model, segment_size=size)
    return count


def uncheckpoint_blocks(blocks: list[nn.Module]) -> None:
    """Take the regions off again."""
    for block in blocks:
        uncheckpoint_module(block)

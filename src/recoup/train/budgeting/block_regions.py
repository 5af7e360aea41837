"""Regions around the blocks of a model: applied, removed, and known to a trainer."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from recoup.engine.applied.model_blocks import block_names, has_parts, repeated_names
from recoup.engine.scopes.module import (
    checkpoint_module,
    free_blocks,
    is_checkpointed,
    uncheckpoint_module,
)
from recoup.errors import UnsupportedError, UsageError
from recoup.train.budgeting.process_budget import sharded_parts


def checkpoint_blocks(
    model: nn.Module, *, only_repeated: bool = False
) -> list[nn.Module]:
    """Put a region around every block that has none; return these blocks.

    Blocks are those that `fit` cuts the model into, except single layers: a region
    around one of these saves nothing. Costs one more forward of the blocks in
    backward; saves the values that they would keep.

    `only_repeated` leaves out blocks that occur once, such as a stem, an embedding or a
    head, if the model has repeated blocks.

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
    """Put regions around groups of `size` repeated blocks; return the block count.

    Costs as much as `checkpoint_blocks`, and holds one input for each region. Remove
    them with `uncheckpoint_module(model)`.

    Returns:
        The number of blocks in these regions.

    Raises:
        UsageError: There are fewer than two blocks.
        UnsupportedError: The model is compiled, or sharded in several units.

    Examples:
        >>> layers = [nn.TransformerEncoderLayer(8, 2) for _ in range(5)]
        >>> model = nn.Sequential(nn.Linear(4, 8), *layers)
        >>> segment_blocks(model, 2)
        5
        >>> _ = uncheckpoint_module(model)
    """
    if sharded_parts(model):
        raise UnsupportedError(
            f"expected a model sharded as a whole with checkpoint_segment_size={size}, "
            "got several sharded units: replaying a region across units would need the "
            "parameters of all of them; leave checkpoint_segment_size out, or shard "
            "the model as a whole."
        )
    count = len(free_blocks(model))
    if count < 2:
        raise UsageError(
            f"expected repeated blocks for checkpoint_segment_size={size}, got {count} "
            "without a region; leave it out, mark parts with checkpoint_module, or set "
            "budget= instead."
        )
    checkpoint_module(model, segment_size=size)
    return count


def uncheckpoint_blocks(blocks: list[nn.Module]) -> None:
    """Remove the regions."""
    for block in blocks:
        uncheckpoint_module(block)


class BlockRegions:
    """Knows which blocks are recomputed, singly or in groups.

    Examples:
        >>> layers = [nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(4)]
        >>> regions = BlockRegions(nn.Sequential(*layers))
        >>> regions.put_on(2)
        >>> regions.recompute_every_block()
        True
        >>> regions.recompute_every_block()
        False
        >>> regions.take_off()
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._alone: list[nn.Module] = []
        self._together = 0
        self._gave_up_segments = False

    def put_on(self, segment_size: int | None) -> None:
        """Recompute the repeated blocks, in groups of `segment_size`.

        Raises:
            UsageError: The model has no repeated blocks.
            UnsupportedError: They cannot be recomputed together.
        """
        if segment_size is not None and segment_size > 1:
            self._together = segment_blocks(self._model, segment_size)
            return
        self._alone = checkpoint_blocks(self._model, only_repeated=True)
        if not self._alone:
            raise UsageError(
                "expected repeated blocks for use_gradient_checkpointing=True, got "
                "none; mark them with checkpoint_module, or set budget= instead."
            )

    def recompute_every_block(self) -> bool:
        """Give every block its own region; return whether any had none."""
        blocks = checkpoint_blocks(self._model)
        self._alone += blocks
        if blocks and self._together:
            self._take_off_segments()
            self._gave_up_segments = True
        return bool(blocks)

    def take_off(self) -> None:
        """Remove all regions."""
        uncheckpoint_blocks(self._alone)
        self._alone = []
        self._take_off_segments()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a snapshot."""
        return {
            "recomputes": self._together + len(self._alone),
            "gave_up_segments": self._gave_up_segments,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Recompute every block if that had become necessary."""
        gave_up = self._together > 0 and state.get("gave_up_segments", False)
        if gave_up or state["recomputes"] > self._together + len(self._alone):
            self.recompute_every_block()

    def _take_off_segments(self) -> None:
        if self._together:
            uncheckpoint_blocks([self._model])
        self._together = 0

"""Regions around the blocks of a model: put on, taken off, and known to a trainer."""

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
    if sharded_parts(model):
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


class BlockRegions:
    """Knows which blocks are recomputed, each by itself or several together.

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
        """Recompute the repeated blocks, so many of them together.

        Raises:
            UsageError: The model has no such blocks.
            UnsupportedError: They cannot be recomputed together.
        """
        if segment_size is not None and segment_size > 1:
            self._together = segment_blocks(self._model, segment_size)
            return
        self._alone = checkpoint_blocks(self._model, only_repeated=True)
        if not self._alone:
            raise UsageError(
                "use_gradient_checkpointing=True recomputes the repeated blocks of a "
                "model: found none in this one. Mark them with checkpoint_module, or "
                "set budget= instead."
            )

    def recompute_every_block(self) -> bool:
        """Give every block a region of its own; say whether any had none."""
        blocks = checkpoint_blocks(self._model)
        self._alone += blocks
        if blocks and self._together:
            self._take_off_segments()
            self._gave_up_segments = True
        return bool(blocks)

    def take_off(self) -> None:
        """Take all regions off again."""
        uncheckpoint_blocks(self._alone)
        self._alone = []
        self._take_off_segments()

    def state_dict(self) -> dict[str, Any]:
        """Return what a snapshot says of them."""
        return {
            "recomputes": self._together + len(self._alone),
            "gave_up_segments": self._gave_up_segments,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Recompute every block if that had turned out to be needed."""
        gave_up = self._together > 0 and state.get("gave_up_segments", False)
        if gave_up or state["recomputes"] > self._together + len(self._alone):
            self.recompute_every_block()

    def _take_off_segments(self) -> None:
        if self._together:
            uncheckpoint_blocks([self._model])
        self._together = 0

"""The regions that a trainer has put around the blocks of its model."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from recoup.errors import UsageError
from recoup.train.budgeting.block_regions import (
    checkpoint_blocks,
    segment_blocks,
    uncheckpoint_blocks,
)


class BlockRegions:
    """Knows which blocks are recomputed, each by itself or several together.

    Args:
        model: The model itself, without its wrapper.

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

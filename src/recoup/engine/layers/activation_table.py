"""The table of activations that are kept for the layers of one forward."""

from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Any, Self

from torch import Tensor

from recoup.backend.memory.storages import alias
from recoup.backend.state.trees import bytes_in, leaves, map_leaves
from recoup.engine.layers.moments import Moment
from recoup.engine.lifetime.values import Hold
from recoup.engine.tiers.protocol import Tier


class Entry:
    """One activation that is kept.

    Args:
        layer: Its layer.
        position: Its place among the layers of a forward, if it is of one.
        activation: The activation: a nested structure of tensors or arrays.
        tier: Where it is kept, if not on its device as it is.
        moment: How things stood for the layers after it, if it is of a forward.
    """

    def __init__(
        self,
        layer: int,
        position: int | None,
        activation: Any,
        tier: Tier | None,
        *,
        moment: Moment | None = None,
    ) -> None:
        self.layer = layer
        self.position = position
        self.moment = moment
        self._holds = map_leaves(partial(_held, tier), activation)

    @property
    def stored_bytes(self) -> int:
        """The bytes it takes where it is kept."""
        return sum(
            leaf.stored_bytes if isinstance(leaf, Hold) else bytes_in(leaf)
            for leaf in leaves(self._holds)
        )

    def activation(self) -> Any:
        """Return it, without a graph behind it."""
        return map_leaves(_fetched, self._holds)

    def position_in(self, layers: Sequence[int], end: int) -> int:
        """Return its place among layers, at `end` or before; -1 if it has none."""
        position = self.position
        if position is None:
            return last_place(layers, self.layer, end + 1)
        fits = position <= end and layers[position] == self.layer
        return position if fits else -1


class Table:
    """The activations that are kept, and the bytes of those that are not.

    Attributes:
        entries: By place in the forward, or by layer if they were saved by hand; the
            oldest first.
        input: The input of the forward.
        limit: One more than the highest layer that was seen.
        saved_bytes: The bytes of activations that need not be kept.
        skipped_bytes: The bytes of checkpoints left out because there were too many.
    """

    def __init__(self) -> None:
        self.entries: dict[object, Entry] = {}
        self.input: Entry | None = None
        self.limit = 0
        self.saved_bytes = 0
        self.skipped_bytes = 0

    def clone(self) -> Self:
        """Return another with the same entries."""
        other = copy(self)
        other.entries = dict(self.entries)
        return other

    def keep(self, key: object, entry: Entry) -> None:
        """Put an entry in."""
        self.entries[key] = entry
        self.limit = max(self.limit, entry.layer + 1)

    def find(self, layer: int) -> Entry | None:
        """Return the last entry of a layer."""
        found = [entry for entry in self.entries.values() if entry.layer == layer]
        return found[-1] if found else None

    def discard(self, layer: int) -> bool:
        """Take the entries of a layer out; return whether there were any."""
        found = [key for key, entry in self.entries.items() if entry.layer == layer]
        for key in found:
            del self.entries[key]
        return bool(found)

    def nearest(self, layers: Sequence[int], end: int) -> tuple[int, Entry | None]:
        """Return the last place up to `end` that is kept, and its entry."""
        start, nearest = -1, self.input
        for entry in self.entries.values():
            position = entry.position_in(layers, end)
            if position >= 0 and position >= start:
                start, nearest = position, entry
        return start, nearest


def last_place(layers: Sequence[int], layer: int, end: int) -> int:
    """Return the last place of a layer before `end`, or -1.

    Examples:
        >>> last_place([0, 1, 0, 1], 0, 2), last_place([0, 1, 0, 1], 0, 4)
        (0, 2)
    """
    places = [place for place in range(end) if layers[place] == layer]
    return places[-1] if places else -1


def _held(tier: Tier | None, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    hold = Hold(alias(leaf))
    hold.assign(tier)
    hold.store()
    return hold


def _fetched(leaf: Any) -> Any:
    if not isinstance(leaf, Hold):
        return leaf
    return leaf.fetch("a checkpoint").detach()

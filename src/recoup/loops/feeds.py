"""Feeds: the inputs of every step, stacked in arrays or listed one by one."""

from collections.abc import Sequence
from copy import copy
from typing import Any

from recoup.errors import UsageError
from recoup.loops.state_trees import Structure, flatten, unflatten


class Stacked:
    """A tree of arrays whose first axis is the step, as in a scan.

    Args:
        tree: The arrays.
    """

    def __init__(self, tree: Any) -> None:
        self.leaves, self._structure = flatten(tree)
        lengths = {len(leaf) for leaf in self.leaves}
        if len(lengths) != 1:
            raise UsageError(
                "the inputs of a loop have one first axis, the step: got lengths "
                f"{sorted(lengths)}. Stack them to equal length, or list them."
            )
        (self.length,) = lengths

    def whole(self) -> Any:
        """Return the tree of arrays."""
        return unflatten(self._structure, self.leaves)

    def with_leaves(self, leaves: dict[int, Any]) -> "Stacked":
        """Return a feed with some leaves replaced."""
        changed = [leaves.get(p, leaf) for p, leaf in enumerate(self.leaves)]
        return Stacked(unflatten(self._structure, changed))

    def at(self, index: int) -> Any:
        """Return the input of one step."""
        return unflatten(self._structure, self.parts(index))

    def parts(self, index: int) -> list[Any]:
        """Return the leaves of the input of one step."""
        return [leaf[index] for leaf in self.leaves]

    def tree(self, index: int, parts: list[Any]) -> Any:
        """Return the input of a step with other leaves."""
        del index
        return unflatten(self._structure, parts)

    def places(self, index: int) -> list[tuple[int, int | None]]:
        """Return, for each leaf of a step, which leaf of the feed it is, and where."""
        return [(place, index) for place in range(len(self.leaves))]


class Listed:
    """One input for every step, each a tree of its own.

    Args:
        trees: The inputs in order.
    """

    def __init__(self, trees: Sequence[Any]) -> None:
        self.leaves: list[Any] = []
        self.length = len(trees)
        self._structures: list[Structure] = []
        self._starts: list[int] = []
        for tree in trees:
            leaves, structure = flatten(tree)
            self._starts.append(len(self.leaves))
            self._structures.append(structure)
            self.leaves.extend(leaves)
        self._starts.append(len(self.leaves))

    def with_leaves(self, leaves: dict[int, Any]) -> "Listed":
        """Return a feed with some leaves replaced."""
        changed = copy(self)
        changed.leaves = [leaves.get(p, leaf) for p, leaf in enumerate(self.leaves)]
        return changed

    def at(self, index: int) -> Any:
        """Return the input of one step."""
        return unflatten(self._structures[index], self.parts(index))

    def parts(self, index: int) -> list[Any]:
        """Return the leaves of the input of one step."""
        return self.leaves[self._starts[index] : self._starts[index + 1]]

    def tree(self, index: int, parts: list[Any]) -> Any:
        """Return the input of a step with other leaves."""
        return unflatten(self._structures[index], parts)

    def places(self, index: int) -> list[tuple[int, int | None]]:
        """Return, for each leaf of a step, which leaf of the feed it is."""
        return [
            (place, None)
            for place in range(self._starts[index], self._starts[index + 1])
        ]


Feed = Stacked | Listed

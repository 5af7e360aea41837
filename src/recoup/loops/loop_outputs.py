"""Outputs: what the steps give besides the state, stacked along a first axis."""

from typing import Any

import torch
from torch import Tensor

from recoup.loops.state_trees import Structure, flatten, unflatten
from recoup.loops.steps import KindError

_Kind = tuple[torch.Size, torch.dtype, torch.device]


class OutputStack:
    """Collects one output a step.

    Args:
        steps: How many steps there will be, if that is known: then the whole is
            allocated at once, else the outputs are stacked at the end.

    Attributes:
        last: The leaves of the output that came last.
    """

    def __init__(self, steps: int | None) -> None:
        self._steps = steps
        self._structure: Structure = None
        self._whole: list[Tensor] = []
        self._rows: list[list[Tensor]] = []
        self._kinds: list[_Kind] = []
        self._count = 0
        self.last: list[Tensor] = []

    def put(self, index: int, output: Any) -> None:
        """Take the output of a step; they come in order."""
        leaves, structure = flatten(output)
        if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise KindError(
                f"the outputs of a loop are trees of tensors: step {index} gave "
                f"{[type(leaf).__name__ for leaf in leaves]}. Return tensors."
            )
        if index == 0:
            self._structure = structure
        elif structure != self._structure:
            raise KindError(
                f"the output of step {index} is built otherwise than that of step 0. "
                "Return the same structure from every step."
            )
        self._count += 1
        self.last = [leaf.detach() for leaf in leaves]
        kinds = [(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]
        if index == 0:
            self._kinds = kinds
        elif kinds != self._kinds:
            raise KindError(
                f"the outputs of a loop are stacked, and step {index} gave tensors of "
                f"{_told(kinds)}, step 0 of {_told(self._kinds)}. Return the same "
                "shapes and types from every step."
            )
        if self._steps is None:
            self._rows.append(self.last)
            return
        if index == 0:
            self._whole = [
                leaf.new_empty((self._steps, *leaf.shape)) for leaf in leaves
            ]
        for whole, leaf in zip(self._whole, self.last, strict=True):
            whole[index] = leaf

    def leaves(self) -> list[Tensor]:
        """Return the stacked leaves."""
        if self._steps is not None:
            return self._whole
        return [torch.stack(column) for column in zip(*self._rows, strict=True)]

    def tree(self, leaves: list[Tensor]) -> Any:
        """Return the stacked outputs as a tree; None if no step was run."""
        return unflatten(self._structure, leaves) if self._count else None


def _told(kinds: list[_Kind]) -> str:
    return ", ".join(
        f"{tuple(shape)} {dtype} on {where}" for shape, dtype, where in kinds
    )

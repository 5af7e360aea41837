"""Undo a step that broke off, so that it can be run again from where it began."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from recoup.api.rollback import Rollback
from recoup.backend.storages import version_of
from recoup.backend.walk import reach
from recoup.measure.repetition import takes_gradient


class Undoing:
    """Remembers where a step begins: gradients, buffers and random generators.

    They are those of the model and of what else the step refers to, such as a head
    or a loss with parameters. Gradients are remembered without being held: a step that
    drops them frees them. Costs one copy of the buffers, a walk through the variables
    of the step, and a tenth of a millisecond for NumPy's generator.

    Args:
        step: Runs forward and backward.
        model: The model that is trained.
        device: Where it computes.

    Examples:
        >>> layer = nn.Linear(1, 1)
        >>> step = lambda: layer(torch.ones(1)).backward()
        >>> undoing = Undoing(step, layer, torch.device("cpu"))
        >>> step()
        >>> undoing.undo(), layer.weight.grad
        (True, None)
    """

    def __init__(
        self, step: Callable[[], Any], model: nn.Module, device: torch.device
    ) -> None:
        reached = reach(model, step, kind=(nn.Module, Tensor))
        modules = [each for each in reached if isinstance(each, nn.Module)]
        leaves = [t for t in reached if isinstance(t, Tensor) and takes_gradient(t)]
        everything = nn.ModuleList(modules)
        self._gradients = _noted(leaves)
        self._rollback = Rollback(everything, device, with_numpy=True)
        self._rollback.remember()

    def undo(self) -> bool:
        """Put everything back; say whether that was possible.

        It is not where gradients that were there before have changed.
        """
        if any(noted.has_changed() for noted in self._gradients):
            return False
        for noted in self._gradients:
            noted.restore()
        self._rollback.restore()
        return True


class _Gradient:
    """The gradient of a leaf, known by a weak reference and its version."""

    def __init__(self, leaf: Tensor) -> None:
        gradient = leaf.grad
        self._leaf = leaf
        self._known = None if gradient is None else weakref.ref(gradient)
        self._version = -1 if gradient is None else version_of(gradient)
        self._is_dense = gradient is None or gradient.layout is torch.strided

    def has_changed(self) -> bool:
        """Return whether what was there cannot be had again.

        A gradient that is gone was dropped by the step, which will do so again. But
        backward adds to it in place only if both are dense and no graph is made: else
        it is gone because the sum has taken its place.
        """
        if self._known is None:
            return False
        gradient, now = self._known(), self._leaf.grad
        if gradient is not None:
            return version_of(gradient) != self._version
        return now is not None and (now.requires_grad or not self._is_dense)

    def restore(self) -> None:
        """Put it back, or none if the step had dropped it."""
        self._leaf.grad = None if self._known is None else self._known()


def _noted(leaves: Iterable[Tensor]) -> list[_Gradient]:
    return [_Gradient(leaf) for leaf in {id(leaf): leaf for leaf in leaves}.values()]

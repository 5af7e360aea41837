"""Undo a step that broke off, so that it can be run again from where it began."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from recoup.api.rollback import Rollback
from recoup.backend.storages import version_of


class Undoing:
    """Remembers where a step begins: gradients, buffers and random generators.

    Gradients are remembered without being held: a step that drops them frees them.
    Costs one copy of the buffers.

    Args:
        model: The model that is trained.
        device: Where it computes.

    Examples:
        >>> layer = nn.Linear(1, 1)
        >>> undoing = Undoing(layer, torch.device("cpu"))
        >>> layer(torch.ones(1)).backward()
        >>> undoing.undo(), layer.weight.grad
        (True, None)
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._gradients = [(p, *_noted(p.grad)) for p in model.parameters()]
        self._rollback = Rollback(model, device)
        self._rollback.remember()

    def undo(self) -> bool:
        """Put everything back; say whether that was possible.

        It is not where a backward pass has added to gradients that were there before.
        """
        found = [(p, known(), version) for p, known, version in self._gradients]
        if any(g is not None and version_of(g) != version for _, g, version in found):
            return False
        for parameter, gradient, _ in found:
            parameter.grad = gradient
        self._rollback.restore()
        return True


def _noted(gradient: Tensor | None) -> tuple[Callable[[], Tensor | None], int]:
    if gradient is None:
        return _nothing, -1
    return weakref.ref(gradient), version_of(gradient)


def _nothing() -> None:
    return None

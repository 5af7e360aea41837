"""Checks of arguments that several calls take."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from recoup.backend.training.optimizer_steps import inner_optimizer
from recoup.core.segments import Action
from recoup.errors import UsageError


def actions_of(allow: Iterable[Action]) -> frozenset[Action]:
    """Return a set of actions, given as actions or as their names.

    Raises:
        UsageError: Something else is given.

    Examples:
        >>> actions_of(["keep", Action.OFFLOAD]) == {Action.KEEP, Action.OFFLOAD}
        True
    """
    given: Any = allow  # of any type, whatever the signature says
    known = ", ".join(f"Action.{action.name}" for action in Action)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UsageError(
            f"expected several actions for allow=, as in [Action.KEEP], got "
            f"{given!r}. There are {known}."
        )
    try:
        return frozenset(Action(each) for each in allow)
    except ValueError as error:
        raise UsageError(
            f"expected actions for allow=, got another value: {error}. There are "
            f"{known}."
        ) from None


def optimizers_of(
    optimizer: Optimizer | Sequence[Optimizer] | None,
) -> tuple[Optimizer, ...]:
    """Return the given optimizers, without wrappers: none, one, or several.

    Raises:
        UsageError: Something else is given.

    Examples:
        >>> optimizers_of(None)
        ()
    """
    if optimizer is None:
        return ()
    given: Any = optimizer
    found: tuple[Any, ...] = (given,)
    if isinstance(given, list | tuple):
        found = tuple(cast("Sequence[Any]", given))
    for each in found:
        if not isinstance(each, Optimizer):
            what = each.__name__ if isinstance(each, type) else type(each).__name__
            raise UsageError(
                "expected an optimizer of the model's parameters, as in "
                "torch.optim.Adam(model.parameters()), or a list of them, got "
                f"{what}."
            )
    return tuple(map(inner_optimizer, found))


def one_model(model: nn.Module | Sequence[nn.Module], step: object) -> nn.Module:
    """Return the given model, or a `ModuleList` of several.

    Raises:
        UsageError: Something else is given, or several models without a step.

    Examples:
        >>> layer = nn.Linear(1, 1)
        >>> one_model(layer, None) is layer, one_model([layer], print)[0] is layer
        (True, True)
    """
    if not isinstance(model, list | tuple):
        return cast("nn.Module", model)
    given = cast("Sequence[Any]", model)
    for each in given:
        if not isinstance(each, nn.Module):
            raise UsageError(
                f"expected a model or a list of models, got {type(each).__name__} in "
                "the list."
            )
    if not given:
        raise UsageError("expected a model or a list of models, got an empty list.")
    if step is None:
        raise UsageError(
            "expected step=, a function that calls the models and runs backward, got "
            "none."
        )
    return nn.ModuleList(given)

"""Arguments that several calls take: checked before anything runs."""

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from recoup.core.errors import UsageError
from recoup.core.segments import Action


def actions_of(allow: Iterable[Action]) -> frozenset[Action]:
    """Return what may be done with values, given as actions or as their names.

    Raises:
        UsageError: It is something else.

    Examples:
        >>> actions_of(["keep", Action.OFFLOAD]) == {Action.KEEP, Action.OFFLOAD}
        True
    """
    given: Any = allow  # of any type, whatever the signature says
    known = ", ".join(f"Action.{action.name}" for action in Action)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UsageError(
            f"allow= takes several actions, as in [Action.KEEP]: got {given!r}. There "
            f"are {known}."
        )
    try:
        return frozenset(Action(each) for each in allow)
    except ValueError as error:
        raise UsageError(f"allow= takes actions: {error}. There are {known}.") from None


def check_optimizer(optimizer: Optimizer | None) -> None:
    """Raise `UsageError` unless it is an optimizer, or None."""
    given: Any = optimizer
    if given is not None and not isinstance(given, Optimizer):
        what = given.__name__ if isinstance(given, type) else type(given).__name__
        raise UsageError(
            f"optimizer= takes an optimizer that was made for the model, as in "
            f"torch.optim.Adam(model.parameters()): got {what}."
        )

"""An exponential moving average of a model's parameters, which often tests better."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from recoup.backend.operators.foreach import copy_all, lerp_all
from recoup.errors import UsageError
from recoup.train.saving.run_state import shard_like, whole_tree


class ParameterAverage:
    """Keeps `average = decay * average + (1 - decay) * parameter`, from the start on.

    Parameters that need no gradient are not averaged. Costs one copy of the others,
    and one pass over both at each `update`.

    Args:
        model: The model.
        decay: The weight of the average at each update.

    Examples:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.zeros_(layer.weight)
        >>> average = ParameterAverage(layer, decay=0.75)
        >>> _ = nn.init.ones_(layer.weight)
        >>> average.update()
        >>> with average.applied():
        ...     print(layer.weight.item())
        0.25
        >>> layer.weight.item()
        1.0
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        self._decay = decay
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._averages = {
            name: parameter.detach().clone()
            for name, parameter in self._parameters.items()
        }
        # The parameters themselves, for each block that applies averages.
        self._taken_off: list[list[list[Tensor]]] = []

    @property
    def is_applied(self) -> bool:
        """Whether the model has its averages now, instead of its parameters."""
        return bool(self._taken_off)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The averages by the names of their parameters."""
        return dict(self._averages)

    def update(self) -> None:
        """Update the average with the present parameters.

        Raises:
            UsageError: The averages are applied.
        """
        refuse_applied(self, "update")
        with torch.no_grad():
            for averages, parameters in self._groups():
                lerp_all(averages, parameters, 1 - self._decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model its averages inside the block, then restore its parameters.

        No training in the block: a trainer refuses to step, fit and load there. It may
        save, and saves the parameters. Costs one more copy of the parameters while the
        block runs.
        """
        self._taken_off.append(self._values())
        try:
            self._put([averages for averages, _ in self._groups()])
            yield
        finally:
            self._put(self._taken_off.pop())

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Give the model its parameters inside the block, if averages are applied.

        Costs one more copy of the parameters then, while the block runs.
        """
        if not self.is_applied:
            yield
            return
        applied = self._values()
        try:
            # The first block replaced the parameters, nested ones replaced averages.
            self._put(self._taken_off[0])
            yield
        finally:
            self._put(applied)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages; with a sharded model all processes must call it."""
        return {"decay": self._decay, "averages": whole_tree(self._averages)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load averages of the same parameters.

        Raises:
            UsageError: They belong to other parameters.
        """
        if set(state["averages"]) != set(self._averages):
            raise UsageError(
                "expected averages of this model's parameters, got others: "
                f"{sorted(set(state['averages']) ^ set(self._averages))} differ."
            )
        with torch.no_grad():
            for name, average in self._averages.items():
                average.copy_(shard_like(average, state["averages"][name]))

    def _values(self) -> list[list[Tensor]]:
        """Return copies of the present parameters."""
        return [
            [parameter.detach().clone() for parameter in parameters]
            for _, parameters in self._groups()
        ]

    def _put(self, values: list[list[Tensor]]) -> None:
        with torch.no_grad():
            for group, (_, parameters) in zip(values, self._groups(), strict=True):
                copy_all(parameters, group)

    def _groups(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        groups: defaultdict[Any, tuple[list[Tensor], list[Tensor]]] = defaultdict(
            lambda: ([], [])
        )
        for name, average in self._averages.items():
            averages, parameters = groups[average.dtype, average.device]
            averages.append(average)
            parameters.append(self._parameters[name])
        return list(groups.values())


def refuse_applied(average: ParameterAverage | None, what: str) -> None:
    """Raise if a model has its averages applied."""
    if average is not None and average.is_applied:
        raise UsageError(
            f"{what} was called while averages are applied: changes of the parameters "
            "would be lost at the end of `with average.applied()`; call it after the "
            "block."
        )

"""An exponential average of a model's parameters, which often tests better."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from recoup.backend.foreach import copy_all, lerp_all
from recoup.core.errors import UsageError
from recoup.train.sharding import shard_like, whole_tree


class ParameterAverage:
    """Keeps `average = decay * average + (1 - decay) * parameter`, from the start on.

    Parameters that need no gradient are not averaged. Costs one copy of the others,
    and one pass over both at each `update`.

    Args:
        model: The model.
        decay: How much of the average stays at each update.

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

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The averages by the names of their parameters."""
        return dict(self._averages)

    def update(self) -> None:
        """Take the parameters as they are now into the average."""
        with torch.no_grad():
            for averages, parameters in self._groups():
                lerp_all(averages, parameters, 1 - self._decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model its averages inside the block, and take them off again.

        Costs one more copy of the parameters while the block runs.
        """
        with torch.no_grad():
            kept = [
                [parameter.detach().clone() for parameter in parameters]
                for _, parameters in self._groups()
            ]
            for averages, parameters in self._groups():
                copy_all(parameters, averages)
        try:
            yield
        finally:
            with torch.no_grad():
                for values, (_, parameters) in zip(kept, self._groups(), strict=True):
                    copy_all(parameters, values)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages; with a sharded model all processes must ask together."""
        return {"decay": self._decay, "averages": whole_tree(self._averages)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load averages of the same parameters.

        Raises:
            UsageError: They are of others.
        """
        if set(state["averages"]) != set(self._averages):
            raise UsageError(
                "an average of other parameters was given: "
                f"{sorted(set(state['averages']) ^ set(self._averages))} differ."
            )
        with torch.no_grad():
            for name, average in self._averages.items():
                average.copy_(shard_like(average, state["averages"][name]))

    def _groups(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        groups: defaultdict[Any, tuple[list[Tensor], list[Tensor]]] = defaultdict(
            lambda: ([], [])
        )
        for name, average in self._averages.items():
            averages, parameters = groups[average.dtype, average.device]
            averages.append(average)
            parameters.append(self._parameters[name])
        return list(groups.values())

"""Every global generator that a training step may draw from: read and put back."""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recoup.backend.state.rng import default_generator, same_state


@dataclass(frozen=True, slots=True)
class RandomStates:
    """The states of Python's, NumPy's and torch's generators at one moment."""

    python: Any
    numpy: Any
    torch: tuple[Tensor, ...]

    def plain(self) -> dict[str, Any]:
        """Return them as numbers, texts and tensors, for a file."""
        version, words, spare = self.python
        plain: dict[str, Any] = {
            "python": [version, list(words), spare],
            "torch": list(self.torch),
        }
        if self.numpy is not None:
            name, key, *rest = self.numpy
            plain["numpy"] = [name, key.tolist(), *rest]
        return plain

    @staticmethod
    def of_plain(plain: dict[str, Any]) -> "RandomStates":
        """Return what `plain` was made of."""
        version, words, spare = plain["python"]
        return RandomStates(
            python=(version, tuple(words), spare),
            numpy=tuple(plain["numpy"]) if "numpy" in plain else None,
            torch=tuple(plain["torch"]),
        )


def random_states(*devices: torch.device, with_numpy: bool = True) -> RandomStates:
    """Return the states of all generators that a step on devices may draw from.

    NumPy's counts only if NumPy has been imported. It alone costs more than a hundred
    microseconds, the others together ten.

    Examples:
        >>> before = random_states(torch.device("cpu"))
        >>> first = torch.rand(3)
        >>> restore_random_states(before, torch.device("cpu"))
        >>> torch.equal(torch.rand(3), first)
        True
    """
    numpy = sys.modules.get("numpy") if with_numpy else None
    return RandomStates(
        python=random.getstate(),
        numpy=None if numpy is None else numpy.random.get_state(),
        torch=tuple(generator.get_state() for generator in _generators(devices)),
    )


def restore_random_states(states: RandomStates, *devices: torch.device) -> None:
    """Put every generator back into the state it had; the devices are the same."""
    random.setstate(states.python)
    for generator, state in zip(_generators(devices), states.torch, strict=False):
        generator.set_state(state)
    numpy = sys.modules.get("numpy")
    if numpy is not None and states.numpy is not None:
        numpy.random.set_state(states.numpy)


def same_random_states(states: RandomStates, *devices: torch.device) -> bool:
    """Return whether no generator was drawn from since; NumPy's is not looked at.

    Examples:
        >>> before = random_states(torch.device("cpu"))
        >>> same_random_states(before, torch.device("cpu"))
        True
        >>> _ = torch.rand(3)
        >>> same_random_states(before, torch.device("cpu"))
        False
    """
    now = (generator.get_state() for generator in _generators(devices))
    return random.getstate() == states.python and all(
        map(same_state, states.torch, now)
    )


def _generators(devices: Sequence[torch.device]) -> list[torch.Generator]:
    found = [torch.default_generator, *map(default_generator, devices)]
    return list({id(generator): generator for generator in found}.values())

"""Every global generator that a training step may draw from: read and put back."""

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from recoup.backend.rng import default_generator


def random_states(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators, as plain data.

    NumPy's counts only if NumPy has been imported.

    Examples:
        >>> before = random_states([])
        >>> first = torch.rand(3)
        >>> restore_random_states(before, [])
        >>> torch.equal(torch.rand(3), first)
        True
    """
    version, words, spare = random.getstate()
    states: dict[str, Any] = {
        "python": [version, list(words), spare],
        "cpu": torch.get_rng_state(),
        "devices": [
            default_generator(device).get_state() for device in _others(devices)
        ],
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)
        words = state["state"]
        states["numpy"] = [
            state["bit_generator"],
            words["key"].tolist(),
            int(words["pos"]),
            int(state["has_gauss"]),
            float(state["gauss"]),
        ]
    return states


def restore_random_states(
    states: dict[str, Any], devices: Sequence[torch.device]
) -> None:
    """Put every generator back into the state it had."""
    version, words, spare = states["python"]
    random.setstate((version, tuple(words), spare))
    torch.set_rng_state(states["cpu"])
    for device, state in zip(_others(devices), states["devices"], strict=False):
        default_generator(device).set_state(state)
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        name, key, position, has_gauss, gauss = states["numpy"]
        numpy.random.set_state((name, key, position, has_gauss, gauss))


def _others(devices: Sequence[torch.device]) -> list[torch.device]:
    return [device for device in devices if device.type not in ("cpu", "meta")]

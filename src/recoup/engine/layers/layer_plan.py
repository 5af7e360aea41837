"""The configuration of kept layers, and the choice of layers that follows from it."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, SupportsIndex, get_args

import torch

from recoup.engine.scopes.policies import check_store
from recoup.engine.tiers.device import Device
from recoup.engine.tiers.half import Half
from recoup.engine.tiers.protocol import Tier
from recoup.errors import CheckpointLimitError, UsageError

Overflow = Literal["spread", "error", "evict_oldest", "skip"]
"""The behaviour of a forward with more checkpoint layers than `max_checkpoints`."""


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Which layers an `ActivationCheckpointer` keeps, how many, and how.

    Attributes:
        checkpoint_every_n_layers: Keep the activations of layers 0, n, 2n, …; none if
            it is 0; `"sqrt"` takes the square root of the number of layers, which
            minimises the activations in memory.
        max_checkpoints: The most checkpoints to keep.
        use_mixed_precision: Keep them in float16, as `Half` does, in half the bytes.
            The error of x is at most |x| / 2^11, or 2^-25 where that is more, which is
            below 2^-14 (6.1e-5). If one of 1024 numbers is above 65504, see `Half`.
        on_overflow: The behaviour of a forward with more checkpoint layers.
            `"spread"` keeps every k-th layer, with k just large enough; `"error"`
            raises; `"evict_oldest"` keeps the last ones; `"skip"` the first ones.
        store: The tier that keeps them, such as `Host()`; by default their device.

    Raises:
        UsageError: An option is out of range.

    Examples:
        >>> CheckpointConfig().checkpoint_every_n_layers
        4
        >>> CheckpointConfig(max_checkpoints=8).on_overflow
        'spread'
    """

    checkpoint_every_n_layers: int | Literal["sqrt"] = 4
    max_checkpoints: int = 64
    use_mixed_precision: bool = False
    on_overflow: Overflow = "spread"
    store: Tier | None = None

    def __post_init__(self) -> None:
        every = self.checkpoint_every_n_layers
        if every != "sqrt" and not is_count(every):
            raise UsageError(
                "expected checkpoint_every_n_layers to be an integer of at least 0, or "
                f"'sqrt', got {every!r}."
            )
        if not is_count(self.max_checkpoints):
            raise UsageError(
                "expected max_checkpoints to be an integer of at least 0, got "
                f"{self.max_checkpoints!r}."
            )
        if not isinstance(self.use_mixed_precision, bool):
            raise UsageError(
                "expected use_mixed_precision to be True or False, got "
                f"{self.use_mixed_precision!r}; for another format than float16, use "
                "store=Half(dtype=...)."
            )
        if self.on_overflow not in get_args(Overflow):
            raise UsageError(
                "expected on_overflow to be one of "
                f"{', '.join(map(repr, get_args(Overflow)))}, got "
                f"{self.on_overflow!r}."
            )
        check_store(self.store)


def place_of(config: CheckpointConfig) -> Tier | None:
    """Return the tier of checkpoints, or None if they stay unchanged on the device."""
    if not config.use_mixed_precision:
        return config.store
    place = Device() if config.store is None else config.store
    return Half(place, dtype=torch.float16, smallest_bytes=0)


def interval_of(config: CheckpointConfig, layer_count: int) -> int:
    """Return the distance of checkpoints in layers, or 0 if there are none."""
    every = config.checkpoint_every_n_layers
    return math.isqrt(layer_count) if every == "sqrt" else every


def choose(
    config: CheckpointConfig, layers: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the positions whose activations are kept, and those that are skipped.

    Examples:
        >>> choose(CheckpointConfig(), range(10))
        ([0, 4, 8], [])
        >>> choose(CheckpointConfig(max_checkpoints=2), range(10))
        ([0, 5], [])
        >>> choose(CheckpointConfig(max_checkpoints=2, on_overflow="skip"), range(10))
        ([0, 4], [8])
    """
    interval = interval_of(config, len(layers))
    found = [p for p, layer in enumerate(layers) if interval and layer % interval == 0]
    limit = config.max_checkpoints
    if len(found) <= limit:
        return found, []
    if config.on_overflow == "error":
        raise too_many(config, layers[found[limit]])
    if config.on_overflow == "skip":
        return found[:limit], found[limit:]
    if config.on_overflow == "evict_oldest":
        return found[len(found) - limit :], []
    if limit == 0:
        return [], []
    return list(range(0, len(layers), -(-len(layers) // limit))), []


def too_many(config: CheckpointConfig, layer: int) -> CheckpointLimitError:
    """Return the error for exceeding `max_checkpoints`."""
    return CheckpointLimitError(
        f"Maximum checkpoint count ({config.max_checkpoints}) exceeded when saving "
        f"layer {layer}"
    )


def is_count(number: object) -> bool:
    """Return whether it is a non-negative integer."""
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def check_layer(layer: SupportsIndex) -> int:
    """Return a layer's index; raise if it is invalid.

    Examples:
        >>> check_layer(torch.tensor(3))
        3
    """
    try:
        index = operator.index(layer)
    except TypeError:
        index = -1
    if index < 0 or isinstance(layer, bool):
        raise UsageError(
            f"expected a layer's index, an integer of at least 0, got {layer!r}."
        )
    return index

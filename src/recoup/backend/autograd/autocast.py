"""Autocast: remember it in forward, put it back for a second run."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AutocastState:
    """How autocast stood for one kind of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool


def autocast_states(device_types: Iterable[str]) -> tuple[AutocastState, ...]:
    """Return how autocast stands now for the CPU and these kinds of device."""
    return tuple(
        AutocastState(
            device_type=kind,
            enabled=torch.is_autocast_enabled(kind),
            dtype=torch.get_autocast_dtype(kind),
            cache=torch.is_autocast_cache_enabled(),
        )
        for kind in sorted({"cpu", *device_types})
        if torch.amp.is_autocast_available(kind)
    )


@contextmanager
def autocast_as(states: Iterable[AutocastState]) -> Iterator[None]:
    """Run the block with autocast as it stood before."""
    with ExitStack() as stack:
        for state in states:
            stack.enter_context(
                torch.autocast(
                    state.device_type,
                    enabled=state.enabled,
                    dtype=state.dtype,
                    cache_enabled=state.cache,
                )
            )
        yield

"""Autocast state and default dtype: read in forward, restored for recomputation."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from recoup.backend.state.trees import tensors
from recoup.core.restoring import restoring


@dataclass(frozen=True, slots=True)
class AutocastState:
    """The autocast settings of one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool


def autocast_states(device_types: Iterable[str]) -> tuple[AutocastState, ...]:
    """Return the current autocast settings of the CPU and these device types."""
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
    """Run the block with recorded autocast settings."""
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


default_dtype: Callable[[], torch.dtype] = torch.get_default_dtype
"""Return the default floating-point dtype."""


def run_in_default(
    dtype: torch.dtype, run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run an operator under the default dtype that was active when it was recorded.

    Only operators without a floating-point argument depend on the default: factories
    and integer operators with a float result. The default is shared by all threads, so
    it is left unchanged for all other operators.

    Examples:
        >>> run_in_default(torch.float64, torch.ones, 1).dtype
        torch.float64
        >>> run_in_default(torch.float64, torch.sin, torch.ones(1)).dtype
        torch.float32
    """
    if any(t.is_floating_point() or t.is_complex() for t in tensors((args, kwargs))):
        return run(*args, **kwargs)
    with in_default(dtype):
        return run(*args, **kwargs)


class in_default(restoring):  # noqa: N801 (used as a verb)
    """Run the block with another default dtype, which holds for all threads.

    Examples:
        >>> with in_default(torch.float64):
        ...     torch.ones(1).dtype
        torch.float64
    """

    __slots__ = ("_dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(partial(torch.set_default_dtype, default_dtype()))
        self._dtype = dtype

    def __enter__(self) -> None:
        super().__enter__()
        torch.set_default_dtype(self._dtype)

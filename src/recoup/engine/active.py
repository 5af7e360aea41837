"""The regions that are open on this thread, and how one is begun and ended."""

import threading
from collections.abc import Hashable

import torch

from recoup.backend.graph import hooks_refused, records_gradients
from recoup.core.errors import UnsupportedError
from recoup.engine.observers import observers
from recoup.engine.region import Options, Region


class _Open(threading.local):
    def __init__(self) -> None:
        self.regions: list[Region] = []


_OPEN = _Open()


def open_regions() -> tuple[Region, ...]:
    """Return the regions that record on this thread now, outermost first."""
    return tuple(_OPEN.regions)


def begin(name: str, options: Options, key: Hashable) -> Region | None:
    """Open a region on this thread.

    Returns:
        The region, or None where autograd saves nothing: there is nothing to do.

    Raises:
        UnsupportedError: The code runs under a torch.func transform that cannot
            carry saved-tensor hooks.
    """
    if not records_gradients() or torch.compiler.is_compiling():
        return None
    refused = hooks_refused()
    if refused is not None:
        raise UnsupportedError(
            f"region {name!r} is entered where PyTorch allows no saved-tensor hooks "
            f"({refused}). Compute the gradient with torch.autograd.grad or backward, "
            "or disable the region inside the transform."
        )
    region = Region(name, options, key)
    for observer in observers():
        observer.began(region)
    region.open()
    _OPEN.regions.append(region)
    return region


def end(region: Region) -> None:
    """Close the region that was opened last on this thread."""
    assert _OPEN.regions[-1] is region, "regions are closed in reverse order"
    _OPEN.regions.pop()
    region.close()
    for observer in observers():
        observer.ended(region)

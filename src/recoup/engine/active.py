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


def is_recordable(name: str) -> bool:
    """Return whether a region makes sense here: autograd saves something.

    Args:
        name: The region's name, for the message.

    Raises:
        UnsupportedError: The code runs under a torch.func transform that cannot
            carry saved-tensor hooks.
    """
    if not records_gradients() or torch.compiler.is_compiling():
        return False
    refused = hooks_refused()
    if refused is not None:
        raise UnsupportedError(
            f"region {name!r} is entered where PyTorch allows no saved-tensor hooks "
            f"({refused}). Compute the gradient with torch.autograd.grad or backward, "
            "or disable the region inside the transform."
        )
    return True


def begin(name: str, options: Options, key: Hashable) -> Region | None:
    """Open a region on this thread, or return None where there is nothing to do."""
    if not is_recordable(name):
        return None
    region = Region(name, options, key)
    enter(region)
    return region


def enter(region: Region) -> None:
    """Let a region record on this thread."""
    for observer in observers():
        observer.began(region)
    region.open()
    _OPEN.regions.append(region)


def end(region: Region) -> None:
    """Close the region that was opened last on this thread."""
    leave(region)
    region.freeze()
    for observer in observers():
        observer.ended(region)


def leave(region: Region) -> None:
    """Suspend the region that was opened last on this thread."""
    assert _OPEN.regions[-1] is region, "regions are closed in reverse order"
    _OPEN.regions.pop()
    region.suspend()

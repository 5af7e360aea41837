"""Handover: outer saved-tensor hooks may keep what a region holds."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import Any, Protocol
from zlib import crc32

import torch
from torch import Tensor

from recoup.backend.autograd.saved_tensors import (
    Pack,
    Unpack,
    ambient_hooks,
    finds_by_place,
)
from recoup.backend.autograd.wrappers import is_wrapper
from recoup.backend.memory.storages import copy_storage, has_storage, version_of
from recoup.core.restoring import restoring
from recoup.engine.lifetime.operations import TapeOperation
from recoup.engine.lifetime.values import Hold, TapeValue
from recoup.engine.recording.observers import is_transparent

_MARKS = 8191
"""The number of distinct shapes for marking tensors."""


HANDING: set[int] = set()
"""The threads that are passing a region's holds on to outer hooks. Nearly always empty,
which hot code checks first."""


def is_handing_over() -> bool:
    """Return whether this thread is passing a region's holds on to outer hooks.

    Tensors saved meanwhile are not ones that plain autograd would have saved.
    """
    return get_ident() in HANDING


def is_watched_from_around() -> bool:
    """Return whether there are outer saved-tensor hooks to pass holds on to."""
    hooks = ambient_hooks()
    return hooks is not None and not is_transparent(hooks[0])


class Collector(Protocol):
    """Collects the tensors that autograd saves in a function's rerun."""

    def take(self, tensor: Tensor, packed: Any, unpack: Unpack) -> None:
        """Add the next saved tensor, which an inner region has packed."""
        ...


def role_around() -> tuple[bool, Collector | None]:
    """Return the role of an enclosing function that backward calls again.

    Its first call discards all saved tensors, so a region inside has nothing to do. Its
    second call must save the same tensors in the same order: regions inside record, and
    pass each saved tensor to the collector. Passing their holds instead would not work:
    these depend on what else is alive, which differs between the calls.

    Returns:
        Whether this is the first call, and the collector if it is the second.
    """
    hooks = ambient_hooks()
    pack: Any = None if hooks is None else hooks[0]
    around = getattr(pack, "__self__", pack)
    if getattr(around, "forgets", False):
        return True, None
    return False, getattr(around, "collector", None)


def mark_of(
    ran: Sequence[TapeOperation],
    needed: Sequence[TapeOperation],
    roots: Sequence[TapeValue],
) -> int:
    """Return a checksum of a region's holds, or -1 if none is needed.

    The holds depend on tiers and on what else is alive, so they may differ between the
    two calls of torch.utils.checkpoint, which matches tensors by position.
    """
    hooks = ambient_hooks()
    if hooks is None or not finds_by_place(hooks[0]):
        return -1
    places = {id(operation): place for place, operation in enumerate(ran)}
    parts = [places[id(operation)] for operation in needed]
    return crc32(repr((parts, [value.producer for value in roots])).encode())


def hand_over(holds: Sequence[Hold], mark: int = -1) -> None:
    """Pass holds on to the active saved-tensor hooks of this thread, if any.

    So an outer region can drop what an inner one holds, and an outer `save_on_cpu`
    offloads it.

    Args:
        holds: The holds.
        mark: The result of `mark_of`. Each plain tensor is expanded, without memory, to
            a shape that depends on it, so that torch.utils.checkpoint raises its error
            instead of confusing two tensors.
    """
    hooks = ambient_hooks()
    if hooks is None or is_transparent(hooks[0]):
        return
    pack, unpack = hooks
    thread = get_ident()
    # As autograd calls hooks. With a graph, a view of several whose base was written to
    # since could not be viewed again.
    with torch.no_grad(), restoring(partial(HANDING.discard, thread)):
        HANDING.add(thread)
        for place, hold in enumerate(holds):
            if mark >= 0:
                pack = partial(_pack_marked, hooks[0], (mark + place) % _MARKS + 1)
            hold.hand_over(pack, unpack)


def _pack_marked(pack: Pack, mark: int, tensor: Tensor) -> Any:
    # Not for wrappers: nothing would undo the expansion.
    if is_wrapper(tensor) or not has_storage(tensor):
        return pack(tensor)
    return pack(tensor.expand(mark, *tensor.shape))


def apart(hold: Hold, kept: Mapping[int, Hold]) -> Hold:
    """Return the hold, or a twin if it is also kept for autograd.

    Outer hooks such as torch.utils.checkpoint's may return each hold only once.
    """
    return hold.twin() if id(hold) in kept else hold


def copy_small(value: TapeValue, hold: Hold, most_bytes: int) -> Hold:
    """Hold a copy of a value instead, if it is small and unchanged."""
    if hold.tensor is None:
        return hold
    # An empty storage belongs to FSDP, which fills it again before backward.
    small = 0 < hold.tensor.untyped_storage().nbytes() <= most_bytes
    if small and version_of(hold.tensor) == hold.version:
        return value.keep(Hold(copy_storage(hold.tensor), hold.geometry))
    return hold


def part_holds(values: Iterable[TapeValue], kept: Mapping[int, Hold]) -> None:
    """Give replays separate twins of the holds that are kept for backward.

    Outer hooks may return each hold only once.
    """
    for value in values:
        if value.hold is not None and id(value.hold) in kept:
            value.keep(value.hold.twin())

"""Handing over: saved-tensor hooks around a region may keep what the region holds."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import Any, Protocol
from zlib import crc32

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
"""The number of shapes that distinguish tensors."""


HANDING: set[int] = set()
"""The threads that pass a region's own holds on to hooks around it. Nearly always it is
empty, which is asked first where every operator waits."""


def is_handing_over() -> bool:
    """Return whether this thread passes a region's own holds on to hooks around it.

    What is saved then is no tensor that plain autograd would have saved.
    """
    return get_ident() in HANDING


def is_watched_from_around() -> bool:
    """Return whether there are saved-tensor hooks to hand anything over to."""
    hooks = ambient_hooks()
    return hooks is not None and not is_transparent(hooks[0])


class Collector(Protocol):
    """Collects what autograd saves in the second call of a function."""

    def take(self, tensor: Tensor, packed: Any, unpack: Unpack) -> None:
        """Take the next saved tensor, which a region inside has packed."""
        ...


def role_around() -> tuple[bool, Collector | None]:
    """Return what a function does around here that is called again in backward.

    Its first call forgets all that autograd saves, so a region has nothing to do there.
    Its second call must find the same tensors in the same order, whatever regions
    inside keep of them: the regions work, and pass each tensor to the collector. What a
    region holds would not do instead. That depends on what else is alive, and is not
    the same in both calls.

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
    """Return a number that stands for what a region holds, or -1 if none is needed.

    What it holds depends on tiers and on what else is alive. In the two calls of
    torch.utils.checkpoint that may differ, and torch finds tensors by their place.
    """
    hooks = ambient_hooks()
    if hooks is None or not finds_by_place(hooks[0]):
        return -1
    places = {id(operation): place for place, operation in enumerate(ran)}
    parts = [places[id(operation)] for operation in needed]
    return crc32(repr((parts, [value.producer for value in roots])).encode())


def hand_over(holds: Sequence[Hold], mark: int = -1) -> None:
    """Pass holds on to the active saved-tensor hooks of this thread, if any.

    So an outer region can drop what an inner one holds, and `save_on_cpu` around a
    region moves it.

    Args:
        holds: The holds.
        mark: The result of `mark_of`. Each plain tensor gets a shape of its own, which
            takes no memory, so that torch.utils.checkpoint raises its error rather than
            give one for another.
    """
    hooks = ambient_hooks()
    if hooks is None or is_transparent(hooks[0]):
        return
    pack, unpack = hooks
    thread = get_ident()
    with restoring(partial(HANDING.discard, thread)):
        HANDING.add(thread)
        for place, hold in enumerate(holds):
            if mark >= 0:
                pack = partial(_pack_marked, hooks[0], (mark + place) % _MARKS + 1)
            hold.hand_over(pack, unpack)


def _pack_marked(pack: Pack, mark: int, tensor: Tensor) -> Any:
    # A wrapper is given back as it is: nothing would take the shape off again.
    if is_wrapper(tensor) or not has_storage(tensor):
        return pack(tensor)
    return pack(tensor.expand(mark, *tensor.shape))


def apart(hold: Hold, kept: Mapping[int, Hold]) -> Hold:
    """Return the hold, or a twin if it is among those that are kept for autograd.

    Hooks that keep it may give it back only once, as those of torch.utils.checkpoint.
    """
    return hold.twin() if id(hold) in kept else hold


def copy_small(value: TapeValue, hold: Hold, most_bytes: int) -> Hold:
    """Hold a copy of a value instead, if it is no larger and has not changed since."""
    if hold.tensor is None:
        return hold
    # One without memory gets it back before backward, from FSDP.
    small = 0 < hold.tensor.untyped_storage().nbytes() <= most_bytes
    if small and version_of(hold.tensor) == hold.version:
        return value.keep(Hold(copy_storage(hold.tensor), hold.geometry))
    return hold


def part_holds(values: Iterable[TapeValue], kept: Mapping[int, Hold]) -> None:
    """Let backward, which has those that are kept, and replays each have their own.

    Hooks that hold them may give each back only once.
    """
    for value in values:
        if value.hold is not None and id(value.hold) in kept:
            value.keep(value.hold.twin())

"""Handing over: saved-tensor hooks around a region may keep what the region holds."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from recoup.backend.autograd.saved_tensors import Unpack, ambient_hooks
from recoup.backend.memory.storages import copy_storage, version_of
from recoup.core.restoring import restoring
from recoup.engine.lifetime.values import Hold, Value
from recoup.engine.recording.observers import is_transparent


class _Handing(threading.local):
    over = False


_HANDING = _Handing()


def is_handing_over() -> bool:
    """Return whether this thread passes a region's own holds on to hooks around it.

    What is saved then is no tensor that plain autograd would have saved.
    """
    return _HANDING.over


def is_watched_from_around() -> bool:
    """Return whether there are saved-tensor hooks to hand anything over to."""
    hooks = ambient_hooks()
    return hooks is not None and not is_transparent(hooks[0])


class Collector(Protocol):
    """Collects what autograd saves in the second call of a function."""

    def take(self, tensor: Tensor, packed: Any, unpack: Unpack) -> None:
        """Take the next saved tensor, which a region inside has packed.

        Args:
            tensor: The tensor.
            packed: What stands for it.
            unpack: Returns the tensor, given `packed`.
        """
        ...


def role_around() -> tuple[bool, Collector | None]:
    """Return what a function does around here that is called again in backward.

    Its first call forgets all that autograd saves, so a region has nothing to do there.
    Its second call must find the same tensors in the same order, whatever regions
    inside keep of them: the regions work, and tell the collector of each tensor. What a
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


def hand_over(holds: Sequence[Hold]) -> None:
    """Pass holds on to the saved-tensor hooks in force on this thread, if any.

    So an outer region can drop what an inner one holds, and `save_on_cpu` around a
    region moves it.
    """
    hooks = ambient_hooks()
    if hooks is None or is_transparent(hooks[0]):
        return
    with restoring(partial(setattr, _HANDING, "over", False)):
        _HANDING.over = True
        for hold in holds:
            hold.hand_over(*hooks)


def apart(hold: Hold, kept: Mapping[int, Hold]) -> Hold:
    """Return the hold, or a twin if it is among those that are kept for autograd.

    Hooks that keep it may give it back only once, as those of torch.utils.checkpoint.
    """
    return hold.twin() if id(hold) in kept else hold


def copy_small(value: Value, most_bytes: int) -> None:
    """Hold a copy of a value instead, if it is no larger and has not changed since."""
    hold = value.hold
    if hold is None or hold.tensor is None:
        return
    # One without memory gets it back before backward, from FSDP.
    small = 0 < hold.tensor.untyped_storage().nbytes() <= most_bytes
    if small and version_of(hold.tensor) == hold.version:
        value.hold = Hold(copy_storage(hold.tensor), hold.geometry)


def part_holds(values: Iterable[Value], kept: Mapping[int, Hold]) -> None:
    """Let backward, which has those that are kept, and replays each have their own.

    Hooks that hold them may give each back only once.
    """
    for value in values:
        if value.hold is not None and id(value.hold) in kept:
            value.hold = value.hold.twin()

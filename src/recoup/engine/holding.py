"""Handing over: saved-tensor hooks around a region may keep what the region holds."""

import threading
from collections.abc import Sequence

from recoup.backend.graph import ambient_hooks
from recoup.engine.observers import is_transparent
from recoup.engine.values import Hold


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


def hand_over(holds: Sequence[Hold]) -> None:
    """Pass holds on to the saved-tensor hooks in force on this thread, if any.

    So an outer region can drop what an inner one holds, and `save_on_cpu` around a
    region moves it.
    """
    hooks = ambient_hooks()
    if hooks is None or is_transparent(hooks[0]):
        return
    _HANDING.over = True
    try:
        for hold in holds:
            hold.hand_over(*hooks)
    finally:
        _HANDING.over = False


def apart(hold: Hold, kept: Sequence[Hold]) -> Hold:
    """Return the hold, or a twin if it is among those that are kept for autograd.

    Hooks that keep it may give it back only once, as those of torch.utils.checkpoint.
    """
    return hold.twin() if any(hold is other for other in kept) else hold

"""Blocks of a plan that are recomputed by calling them again.

Such a block's forward, replaced on the instance, asks the plan at each call whether
backward repeats it. Hooks, parameters and `state_dict` are unchanged.
"""

import weakref
from collections.abc import Hashable, Iterable
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recoup.backend.compiler.recognition import leave_uncompiled
from recoup.engine.lifetime.handover import is_watched_from_around
from recoup.engine.recording.active import depth, is_recordable, region
from recoup.engine.recording.region_options import Options
from recoup.engine.replay.call_state import BlockState, BlockView
from recoup.engine.replay.rerun import CallIdentity, Rerun, run_first
from recoup.engine.verification.verification_log import LEDGER


class DueCall(Protocol):
    """A call that is about to start and that backward repeats."""

    @property
    def name(self) -> str:
        """Its name in messages and statistics."""
        ...

    @property
    def key(self) -> Hashable:
        """Its identity for verification."""
        ...

    @property
    def options(self) -> Options:
        """The options of a region in its place."""
        ...

    def began(self, call: Rerun) -> None:
        """Record that the call runs."""
        ...


class Caller(Protocol):
    """The owner of the plan, which knows the block calls that backward repeats."""

    def due_call(self, block: str) -> DueCall | None:
        """Return the block call that is about to start, and clear it."""
        ...


class RepeatedForward:
    """The forward of a block, some calls of which backward repeats.

    A block that changed since it was found repeatable, for example by a new hook, or
    that is called inside other saved-tensor hooks, runs in a region instead.
    """

    belongs_to_plan = True
    """Excludes it, like hooks, from snapshots of a module's attributes."""

    def __init__(self, block: nn.Module, name: str, caller: Caller) -> None:
        self._block = weakref.ref(block)
        self.name = name
        self.caller = caller
        self._view: BlockView | None = None

    @leave_uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        block = self._block()
        assert block is not None, "its own forward is called"
        forward = MethodType(type(block).forward, block)
        due = self.caller.due_call(self.name)
        if due is None:
            return forward(*args, **kwargs)
        view = self._view
        if view is None:
            view = self._view = BlockView(block)
        if not (view.is_current and _is_alone(due.name) and _are_plain((args, kwargs))):
            with region(due.name, due.options, due.key):
                return forward(*args, **kwargs)
        key = ("repeated", due.key)
        verify = due.options.verify
        verifies = verify != "off" and (verify != "first" or LEDGER.needs(key))
        identity = CallIdentity(due.name, key, verifies)
        call = Rerun(forward, args, kwargs, identity, BlockState(view, key))
        due.began(call)
        return run_first(call)

    def put_on(self) -> None:
        """Replace the block's forward."""
        block = self._block()
        if block is not None:
            block.__dict__["forward"] = self

    def remove(self) -> None:
        """Restore the block's own forward."""
        block = self._block()
        if block is not None and block.__dict__.get("forward") is self:
            del block.__dict__["forward"]

    def __getstate__(self) -> dict[str, Any]:
        """Return plain data, without the view of this block."""
        return {"block": self._block(), "name": self.name, "caller": self.caller}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Rebuild the forward for the copied block."""
        self.__init__(**state)


def _is_alone(name: str) -> bool:
    """Return whether no region or other hooks enclose the call, as during `fit`."""
    return is_recordable(name) and not depth() and not is_watched_from_around()


_PLAIN = frozenset(
    {int, float, complex, str, bool, type(None), torch.dtype, Tensor, nn.Parameter}
)


def _are_plain(arguments: Iterable[Any]) -> bool:
    """Return whether arguments are tensors and constants, which no call can change."""
    for each in arguments:
        kind = type(each)
        if kind in _PLAIN:
            continue
        parts = each.values() if kind is dict else each
        if kind not in (dict, tuple) or not _are_plain(parts):
            return False
    return True

"""Modules: add a region around every forward of a module, and remove it."""

import functools
import sys
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakSet, finalize, ref

from torch import nn

from recoup.backend.autograd.saved_tensors import is_in_backward
from recoup.backend.compiler.recognition import call_slot, is_compiled, leave_uncompiled
from recoup.engine.applied.applied_plan import Applied, plans_on
from recoup.engine.applied.model_blocks import segment_names
from recoup.engine.applied.planned_runs import Segments
from recoup.engine.recording.active import Call, begin, end, skip, transform_advice
from recoup.engine.recording.region_options import Options
from recoup.engine.replay.rerun import rerun
from recoup.engine.scopes.policies import Policy, recomputes_beside
from recoup.engine.tiers.protocol import Tier
from recoup.engine.verification.replay_check import LEDGER, Verify, check_verify
from recoup.errors import UnsupportedError, UsageError

_ATTACHED = "_recoup_attached"
_FLAG = "use_gradient_checkpointing"
_ABSENT = "absent"
_UNVERIFIED = ("module", None)
_KNOWN: WeakSet[nn.Module] = WeakSet()


Model = TypeVar("Model", bound=nn.Module)


def checkpoint_module(  # noqa: PLR0913 (options by keyword)
    module: Model,
    *,
    name: str | None = None,
    policy: Policy | None = None,
    verify: Verify = "first",
    cache: bool = False,
    store: Tier | None = None,
    segment_size: int | None = None,
) -> Model:
    """Run every forward of a module in a region, or in one per few blocks.

    The module stays the same object with the same parameters, and its `state_dict` has
    the same keys. Set `module.use_gradient_checkpointing = False` to disable it for
    later passes. A module with compiled parts is called again in backward instead of
    being recorded.

    Args:
        module: The module.
        name: Its name in statistics and error messages; by default its class.
        policy: Which outputs to keep although they could be recomputed.
        verify: As for `CheckpointScope`.
        cache: As for `CheckpointScope`.
        store: As for `CheckpointScope`.
        segment_size: The number of consecutive blocks per region, instead of one region
            for all; the last region has the rest. Blocks are the module's repeated
            parts: layers, not an embedding, a stem or a head. Blocks that already have
            a region keep it and do not count. Larger segments hold fewer inputs but
            have more alive at once in backward; each block is recomputed once at any
            size. A segment is named after its first block.

    Returns:
        The module.

    Raises:
        UsageError: It is no module or has a region already; or `segment_size` is given
            and it has too few blocks.
        UnsupportedError: It is compiled, and a store or a segment size is given.

    Examples:
        >>> import torch
        >>> layer = checkpoint_module(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        >>> layer(torch.ones(2, 4)).sum().backward()
        >>> sorted(layer.state_dict())
        ['0.bias', '0.weight']
        >>> _ = uncheckpoint_module(layer)
        >>> model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
        >>> model = checkpoint_module(model, segment_size=4)  # three regions
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> _ = uncheckpoint_module(model)
    """
    _require_module(module)
    if _ATTACHED in module.__dict__:
        raise UsageError(
            f"expected a {type(module).__name__} that is not checkpointed, got one "
            "that is already; call uncheckpoint_module on it first."
        )
    check_verify(verify)
    options = Options(
        recompute=recomputes_beside(store, policy),
        policy=policy,
        verify=verify,
        cache=cache,
        store=store,
    )
    name = name or type(module).__name__
    attached: RegionHooks | Replaced | Segmented
    if segment_size is not None:
        attached = _segment(module, segment_size, options)
    elif is_compiled(module):
        if store is not None:
            raise UnsupportedError(
                f"this {type(module).__name__} is compiled: it is called again in "
                f"backward and keeps nothing that {store!r} could hold. Leave out "
                "store, or checkpoint the module before compiling it."
            )
        attached = _replace(module)
    else:
        attached = RegionHooks(name, options)
        _forget_at_its_end(module)
        attached.handles = (
            module.register_forward_pre_hook(attached.before, with_kwargs=True),
            module.register_forward_hook(attached.after, always_call=True),
        )
    attributes = module.__dict__
    attributes[_ATTACHED] = (attached, attributes.get(_FLAG, _ABSENT))
    attributes[_FLAG] = True
    return module


def uncheckpoint_module(module: Model) -> Model:
    """Remove the regions from a module; do nothing if it has none.

    Without regions of `checkpoint_module`, removes a plan of `fit` or `apply_plan`.
    Their handles do so as well, but a copy of a model has the plan without the handle.

    Returns:
        The module, as it was before `checkpoint_module`, `fit` or `apply_plan`.

    Examples:
        >>> import copy, torch
        >>> layer = checkpoint_module(nn.Linear(4, 4))
        >>> is_checkpointed(uncheckpoint_module(copy.deepcopy(layer)))
        False
    """
    _require_module(module)
    attached, flag_before = module.__dict__.pop(_ATTACHED, (None, _ABSENT))
    if attached is not None:
        attached.take_off(module)
        del module.__dict__[_FLAG]
        if flag_before != _ABSENT:
            module.__dict__[_FLAG] = flag_before
        return module
    for applied in plans_on(module):
        applied.remove()
    return module


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether the module's next forward will run in a region."""
    _require_module(module)
    return _ATTACHED in module.__dict__ and bool(module.__dict__.get(_FLAG))


def free_blocks(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the blocks available for segments: those without a region.

    Examples:
        >>> layers = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)]
        >>> _ = checkpoint_module(layers[1])
        >>> free_blocks(nn.Sequential(*layers))
        ('0', '2')
    """
    return tuple(
        name
        for name in segment_names(module)
        if not is_checkpointed(module.get_submodule(name))
    )


def _require_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise UsageError(f"expected a module, got {type(module).__name__}.")


def _key(module: nn.Module) -> Hashable:
    """Return a module's identity for verification, independent of its name."""
    return "module", ref(module)


def _forget_at_its_end(module: nn.Module) -> None:
    if module not in _KNOWN:
        _KNOWN.add(module)
        key = _key(module)
        hash(key)  # caches the hash, which a dead weak reference could not compute
        finalize(module, LEDGER.forget, key).atexit = False


@dataclass
class RegionHooks:
    """Opens a region before a module's forward and closes it afterwards."""

    name: str
    options: Options
    handles: tuple[Any, ...] = ()
    leaves: bool = False

    @leave_uncompiled
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Open a region, if the module's flag is set."""
        del args, kwargs
        owner = call_of_hook()
        try:
            begin_call(owner, self)
            if module.__dict__.get(_FLAG, False):
                key = _key(module) if self.options.verify == "first" else _UNVERIFIED
                begin(owner, self.name, self.options, key)
            else:
                skip(owner)
        except Exception:
            raise  # torch calls `after`
        except BaseException:
            owner.leave()
            raise

    @leave_uncompiled
    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Close the region, also after an exception."""
        del module, args, output
        if is_calling(self) or not self.leaves:
            end(end_call(self))
        if self.leaves and not is_calling(self):
            self.handles[1].remove()
        # Torch suppresses errors of hooks after an exception: only add a note to it.
        error = sys.exc_info()[1]
        advice = transform_advice(self.name, error)
        if error is not None and advice is not None:
            error.add_note(advice)

    def take_off(self, module: nn.Module) -> None:
        """Remove the hooks, except the one that must still end a running call."""
        del module
        end_interrupted_calls()
        self.leaves = is_calling(self)
        for handle in self.handles[: 1 if self.leaves else 2]:
            handle.remove()


@dataclass
class Segmented:
    """Runs the blocks of a module in regions of several blocks each."""

    applied: Applied

    def take_off(self, module: nn.Module) -> None:
        """Remove the hooks."""
        del module
        self.applied.remove()


def _segment(module: nn.Module, size: object, options: Options) -> Segmented:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UsageError(f"expected segment_size of at least 1, got {size!r}.")
    kind = type(module).__name__
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise UsageError(
            f"expected a module with a forward for segment_size={size}, got a {kind}, "
            "which has none; give the module that runs its members."
        )
    if is_compiled(module):
        raise UnsupportedError(
            f"expected an eager module for segment_size={size}, got a {kind} with "
            "compiled parts, which are recomputed one by one; call checkpoint_module "
            "before torch.compile, or leave out segment_size and checkpoint its blocks."
        )
    blocks = free_blocks(module)
    if len(blocks) < 2:
        raise UsageError(
            f"expected a module with several blocks in a row for segment_size={size}, "
            f"got a {kind} with {len(blocks)}; give the part that has several, or put "
            "a CheckpointScope around the layers of each segment."
        )
    return Segmented(Applied(module, Segments(blocks, size, options), flag=_FLAG))


@dataclass
class Replaced:
    """Calls a compiled module's forward through `rerun`."""

    place: str
    original: Callable[..., Any]
    was_set: bool

    def take_off(self, module: nn.Module) -> None:
        """Restore the original."""
        if self.was_set:
            module.__dict__[self.place] = self.original
        else:
            del module.__dict__[self.place]


def _replace(module: nn.Module) -> Replaced:
    place = call_slot(module)
    original = getattr(module, place)
    replaced = Replaced(place, original, place in module.__dict__)
    module.__dict__[place] = functools.partial(_call_again, module, original)
    return replaced


def _call_again(
    module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if module.__dict__.get(_FLAG, False):
        return rerun(original, *args, **kwargs)
    return original(*args, **kwargs)


class _Calls(threading.local):
    """The running calls of this thread, and their owners.

    Torch runs a module's `always_call` hooks after an exception, but not after a
    `KeyboardInterrupt`. The regions of such a call are closed when the next one begins.
    """

    def __init__(self) -> None:
        self.stack: list[tuple[Call, object]] = []


_CALLS = _Calls()


def call_of_hook() -> Call:
    """Return an owner for the module call in which a hook runs."""
    # Two up is torch's frame that runs the hooks and then forward.
    return Call(sys._getframe(2))  # noqa: SLF001 (of Python)


def begin_call(owner: Call, caller: object) -> None:
    """Record a call, from a module's hook.

    Inside another call this costs a walk through the running frames.

    Args:
        owner: The result of `call_of_hook`. After an interrupt here the caller must
            call its `leave`, because the entry would keep its frame alive.
        caller: The object whose call it is.
    """
    if _CALLS.stack:
        end_interrupted_calls()
    _CALLS.stack.append((owner, caller))


def end_call(caller: object) -> object:
    """Record the end of the last call; return its owner."""
    if not _CALLS.stack:
        return caller
    return _CALLS.stack.pop()[0]


def is_calling(caller: object) -> bool:
    """Return whether a call of this caller is running on this thread."""
    return any(other is caller for _, other in _CALLS.stack)


def end_interrupted_calls() -> None:
    """End the regions of calls that are no longer running.

    Not during a backward: at its end torch would restore the hooks and modes of the
    closed region.
    """
    while _CALLS.stack and not _CALLS.stack[-1][0].is_under_way():
        if is_in_backward():
            return
        _CALLS.stack.pop()[0].end_if_left()

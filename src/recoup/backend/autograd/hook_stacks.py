"""Torch's per-thread stacks of hooks and modes: remove one entry from any position.

Torch pops the top entry, whatever it is. After an interrupt left an entry on top, the
owner of the entry below pops the wrong one: its own stays on the stack, and other
entries may have been pushed since.
"""

from collections.abc import Callable
from typing import Any

from torch.utils import _python_dispatch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from recoup.backend.autograd.saved_tensors import (
    Pack,
    Unpack,
    ambient_hooks,
    pop_hooks,
    push_hooks,
)

_Hooks = tuple[Pack, Unpack]
_TELL = "set_is_in_mode_without_ignore_compile_internals"


class Footing:
    """The top of both stacks before recoup pushed its own entries."""

    __slots__ = ("hooks", "mode")

    def __init__(self) -> None:
        self.hooks = ambient_hooks()
        stack = _get_current_dispatch_mode_stack()
        self.mode = stack[-1] if stack else None

    def take_off_hooks(self, pack: Pack) -> None:
        """Remove the hooks that were pushed at this point of the stack."""
        hooks = ambient_hooks()
        if hooks is not None and hooks[0] == pack:
            pop_hooks()
            return
        stack = _pop_hooks_above(lambda _: False)
        place = _place_of(pack, [hooks[0] for hooks in stack])
        if place is None and self.hooks is not None:
            place = _place_of(self.hooks[0], [hooks[0] for hooks in stack])
        if place is not None:
            del stack[place]
        _push_all(stack)

    @staticmethod
    def drop(pack: Pack, mode: TorchDispatchMode | None) -> None:
        """Remove these hooks and this mode from any position, if they are present."""
        above = _pop_hooks_above(lambda hooks: hooks[0] == pack)
        if ambient_hooks() is not None:
            pop_hooks()
        _push_all(above)
        if mode is not None and mode in _get_current_dispatch_mode_stack():
            Footing.__new__(Footing).leave_mode(mode)

    def leave_mode(self, mode: TorchDispatchMode) -> None:
        """Leave the dispatch mode that was entered at this point of the stack."""
        stack: list[Any] = _get_current_dispatch_mode_stack()
        if stack and stack[-1] is mode:
            return mode.__exit__(None, None, None)
        stack.reverse()
        place = _place_of(mode, stack)
        if place is not None:
            _give_flags(mode, stack[place - 1])
        elif self.mode is not None:
            place = _place_of(self.mode, stack)
        if place is not None:
            above: list[Any] = [_pop_mode() for _ in range(place + 1)]
            for entered in reversed(above[:-1]):
                _push_mode(entered)
        return None


class StacksSnapshot:
    """This thread's stacks of saved-tensor hooks and dispatch modes."""

    def __init__(self) -> None:
        self._hooks = ambient_hooks()
        self._modes: list[Any] = _get_current_dispatch_mode_stack()
        flags = vars(_python_dispatch)
        self._flags = {name: flags[name] for name in flags if name.startswith("_is_in")}

    def restore(self) -> None:
        """Remove entries pushed since, such as those that an interrupt left."""
        for mode in reversed(_get_current_dispatch_mode_stack()):
            if any(mode is known for known in self._modes):
                break
            # Not `__exit__`: it may have run already and popped another mode.
            _pop_mode(vars(mode).get("_dispatch_key", vars(mode).get("_mode_key")))
            for name, flag in self._flags.items():
                setattr(_python_dispatch, name, flag)
            tell_guards = getattr(_python_dispatch, _TELL, None)  # newer torch only
            if tell_guards is not None:
                flag = self._flags["_is_in_any_mode_without_ignore_compile_internals"]
                tell_guards(flag)
        above = _pop_hooks_above(lambda hooks: hooks == self._hooks)
        if ambient_hooks() != self._hooks:  # popped since: keep the others
            _push_all(above)


def enter_at_bottom(mode: TorchDispatchMode) -> None:
    """Enter a dispatch mode below all that are active on this thread.

    There it survives modes that user code enters and leaves: torch pops the top of the
    stack, which is never this one.
    """
    above: list[Any] = [_pop_mode() for _ in _get_current_dispatch_mode_stack()]
    mode.__enter__()
    for entered in reversed(above):
        _push_mode(entered)
    if above:
        _swap_flags(mode, above[-1])


def leave_anywhere(mode: TorchDispatchMode) -> None:
    """Leave a dispatch mode at any position of the stack; do nothing if absent."""
    stack: list[Any] = _get_current_dispatch_mode_stack()
    if not any(entered is mode for entered in stack):
        return
    above: list[Any] = []
    while _get_current_dispatch_mode_stack()[-1] is not mode:
        above.append(_pop_mode())
    if above:
        _swap_flags(mode, above[-1])
    mode.__exit__(None, None, None)
    for entered in reversed(above):
        _push_mode(entered)


def has_infrastructure_modes() -> bool:
    """Return whether fake tensors or functionalization are active on this thread."""
    return any(mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack())


def push_hooks_at_bottom(pack: Pack, unpack: Unpack) -> None:
    """Push saved-tensor hooks below all that are active on this thread."""
    above = _pop_hooks_above(lambda _: False)
    push_hooks(pack, unpack)
    _push_all(above)


def take_out_hooks(pack: Pack) -> None:
    """Remove saved-tensor hooks from any position of the stack."""
    stack = _pop_hooks_above(lambda _: False)
    _push_all([hooks for hooks in stack if hooks[0] != pack])


def _pop_hooks_above(is_reached: Callable[[_Hooks], bool]) -> list[_Hooks]:
    """Pop hooks until `is_reached` holds for the top; return them, topmost first."""
    above: list[_Hooks] = []
    while (hooks := ambient_hooks()) is not None and not is_reached(hooks):
        above.append(hooks)
        pop_hooks()
    return above


def _push_all(above: list[_Hooks]) -> None:
    for hooks in reversed(above):
        push_hooks(*hooks)


def _swap_flags(one: TorchDispatchMode, other: TorchDispatchMode) -> None:
    """Swap the flags that two modes restore on exit, because they swap positions."""
    for name, flags in vars(one).items():
        others = vars(other).get(name)
        if name.startswith("old_") and flags and others:
            flags[-1], others[-1] = others[-1], flags[-1]


def _place_of(wanted: Any, stack: list[Any]) -> int | None:
    """Return the position from the top; by `==`, since bound methods are not unique."""
    return next((n for n, found in enumerate(stack) if found == wanted), None)


def _give_flags(left: TorchDispatchMode, above: TorchDispatchMode) -> None:
    """Pass the flags that a removed mode would restore to the mode above it."""
    for name, flags in vars(left).items():
        others = vars(above).get(name)
        if name.startswith("old_") and flags and others:
            others[-1] = flags.pop()

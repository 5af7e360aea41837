"""Snapshots of Python attributes of modules and objects."""

import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from types import FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any

from torch import nn

from recoup.backend.state.walk import (
    HOOKS,
    attributes_of,
    is_large,
    is_of_library,
    items_of,
    reach,
    slots_of,
)
from recoup.core.restoring import refill

_MOST_ARRAY_BYTES = 1 << 24
_PLAIN = (int, float, complex, str, bytes, type(None))


class Attributes:
    """A snapshot of Python attributes, including contents of plain containers in them.

    These are counters, flags such as "initialised", lists and dictionaries, NumPy
    arrays up to 16 MiB, training flags, and which tensors are parameters, of all
    modules and objects that `reach` finds, also through code. A list or number in a
    function's variable is not restored. Objects of torch, NumPy and the standard
    library are not changed, nor containers of more than 10 000 items.

    Examples:
        >>> layer = nn.Tanh()
        >>> layer.calls, layer.seen = 0, []
        >>> before = Attributes(layer)
        >>> layer.calls += 1
        >>> layer.seen.append(3)
        >>> layer.late = True
        >>> before.restore()
        >>> layer.calls, layer.seen, hasattr(layer, "late")
        (0, [], False)
    """

    def __init__(self, *things: object) -> None:
        self._things = things
        self._restorers: list[Callable[[], None]] = []
        self.take()

    def take(self) -> None:
        """Save the current attributes."""
        self._restorers = [
            restorer
            for each in _held_by_objects(self._things)
            for restorer in _restorers_of(each)
        ]

    def restore(self) -> None:
        """Restore attributes and contents that have changed."""
        for restorer in self._restorers:
            restorer()


class Numbers:
    """A snapshot of attributes that are numbers, texts or flags.

    Unlike `Attributes` this keeps no tensors alive that a step stored in an attribute.
    """

    def __init__(self, *things: object) -> None:
        found = _held_by_objects(things)
        self._known = [
            (attributes, name, value)
            for attributes in map(_state_of, found)
            for name, value in attributes.items()
            if isinstance(value, _PLAIN)
        ]

    def restore(self) -> None:
        """Restore those that still exist."""
        for attributes, name, value in self._known:
            if name in attributes:
                attributes[name] = value


def _held_by_objects(things: Iterable[object]) -> list[Any]:
    """Return the modules and user objects that things lead to, and their contents."""
    owners = [each for each in reach(*things, kind=object) if _is_owner(each)]
    return reach(*owners, kind=object, through_code=False)


def _is_owner(thing: Any) -> bool:
    if isinstance(thing, nn.Module):
        return True
    is_code = isinstance(thing, FunctionType | MethodType | type)
    return not is_code and (
        type(thing) is SimpleNamespace or not is_of_library(type(thing).__module__)
    )


def _state_of(thing: Any) -> dict[str, Any]:
    """Return the attributes of a module or user object; else an empty dictionary."""
    return attributes_of(thing) if _is_owner(thing) else {}


def _restorers_of(thing: Any) -> Iterator[Callable[[], None]]:
    """Yield functions that restore an object's current state."""
    if _is_owner(thing):
        # Also if empty: the object may get attributes later.
        hooks = HOOKS if isinstance(thing, nn.Module) else ()
        yield _dictionary(attributes_of(thing), hooks)
        for slot in slots_of(type(thing)):
            yield _slot(slot, thing)
    if type(thing).__module__ == "numpy" and type(thing).__name__ == "ndarray":
        array: Any = thing
        if array.nbytes <= _MOST_ARRAY_BYTES and array.flags.writeable:
            yield _array(array)
    elif isinstance(thing, list | set | deque | dict) and not is_large(thing):
        yield _dictionary(thing, ()) if isinstance(thing, dict) else _items(thing)


def _dictionary(now: dict[Any, Any], left_out: Iterable[str]) -> Callable[[], None]:
    skipped = frozenset(left_out)

    def is_skipped(pair: tuple[Any, Any]) -> bool:
        # Hooks stay, and so does the forward that a plan puts on a block.
        return pair[0] in skipped or (
            bool(skipped)
            and pair[0] == "forward"
            and getattr(pair[1], "belongs_to_plan", False)
        )

    before = [pair for pair in items_of(now) if not is_skipped(pair)]
    # Through the base class: subclasses may override with other behaviour.
    base = OrderedDict if isinstance(now, OrderedDict) else dict

    def restore() -> None:
        pairs = items_of(now)
        kept = [pair for pair in pairs if is_skipped(pair)]
        ours = [pair for pair in pairs if not is_skipped(pair)]
        if not _are_same([*chain(*before)], [*chain(*ours)]):
            refill(now, (*before, *kept), base)

    return restore


def _items(now: Any) -> Callable[[], None]:
    before = items_of(now)

    def restore() -> None:
        if _are_same(before, items_of(now)):
            return
        if isinstance(now, list):
            list.__setitem__(now, slice(None), before)
        else:
            refill(now, before, set if isinstance(now, set) else deque)

    return restore


def _array(now: Any) -> Callable[[], None]:
    before = now.copy()

    def restore() -> None:
        now[...] = before

    return restore


def _slot(slot: MemberDescriptorType, thing: Any) -> Callable[[], None]:
    absent = object()

    def value() -> Any:
        try:
            return slot.__get__(thing)
        except AttributeError:
            return absent

    before = value()

    def restore() -> None:
        if value() is not before:
            slot.__delete__(thing) if before is absent else slot.__set__(thing, before)

    return restore


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))

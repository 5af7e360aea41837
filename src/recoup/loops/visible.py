"""Visible: the objects a function can see, and the function with others in their place.

Looked at are closures, defaults, bound objects, modules, named globals and containers.
"""

import copy
import functools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_MOST_OBJECTS = 50_000
_DULL = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    types.ModuleType,
    torch.device,
    torch.dtype,
)
_LIBRARIES = ("torch.", "numpy.", "math.", "builtins.")


def visible(function: Any, kind: type) -> list[Any]:
    """Return the objects of a kind that a function can see, each once.

    Costs some microseconds for each object on the way, up to 50 000 of them.

    Examples:
        >>> numbers = {"some": [torch.ones(1)]}
        >>> visible(lambda: numbers["some"], torch.Tensor)
        [tensor([1.])]
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    # What is visited stays alive until the end, so that no address is used twice.
    waiting: list[Any] = [function]
    place = 0
    while place < len(waiting) and place < _MOST_OBJECTS:
        thing = waiting[place]
        place += 1
        if id(thing) in seen or isinstance(thing, _DULL) or _is_ours(thing):
            continue
        seen.add(id(thing))
        if isinstance(thing, kind):
            found[id(thing)] = thing
        else:
            waiting.extend(_inside(thing))
    return list(found.values())


def rebuilt(function: Any, others: dict[int, Any]) -> Any:
    """Return a function that sees other objects, by `id`, in place of some.

    Nothing that exists is changed: functions, containers and objects on the way are
    copied as far as they differ. Globals stay what they are.

    Examples:
        >>> factor = 2
        >>> def make(factor):
        ...     return lambda x: x * factor
        >>> double = make(factor)
        >>> rebuilt(double, {id(factor): 10})(4), double(4)
        (40, 8)
    """
    return _rebuilt(function, others, {})


def _rebuilt(thing: Any, others: dict[int, Any], begun: dict[int, Any]) -> Any:
    if id(thing) in others:
        return others[id(thing)]
    if id(thing) in begun or isinstance(thing, _DULL):
        return begun.get(id(thing), thing)
    begun[id(thing)] = thing  # a function that sees itself goes on seeing itself
    made = _copied(thing, lambda part: _rebuilt(part, others, begun))
    begun[id(thing)] = made
    return made


def _copied(thing: Any, change: Any) -> Any:
    if isinstance(thing, types.FunctionType):
        return _copied_function(thing, change)
    if isinstance(thing, functools.partial):
        changed = change((thing.func, thing.args, thing.keywords))
        func, args, keywords = changed
        return functools.partial(func, *args, **keywords)
    if isinstance(thing, types.MethodType):
        return types.MethodType(change(thing.__func__), change(thing.__self__))
    if type(thing) in (list, tuple):
        parts = [change(part) for part in thing]
        same = all(map(_is, parts, thing))
        return thing if same else type(thing)(parts)
    if type(thing) is dict:
        parts = {name: change(part) for name, part in thing.items()}
        return thing if all(parts[n] is thing[n] for n in thing) else parts
    own = getattr(thing, "__dict__", None)
    if own is None or f"{type(thing).__module__}.".startswith(_LIBRARIES):
        return thing
    parts = {name: change(part) for name, part in own.items()}
    if all(parts[name] is own[name] for name in own):
        return thing
    made = copy.copy(thing)
    made.__dict__.update(parts)
    return made


def _copied_function(function: types.FunctionType, change: Any) -> Any:
    cells = function.__closure__ or ()
    contents = [_content(cell) for cell in cells]
    changed = [change(content) for content in contents]
    defaults = change(function.__defaults__)
    named = change(function.__kwdefaults__)
    if (
        all(map(_is, contents, changed))
        and defaults is function.__defaults__
        and named is function.__kwdefaults__
    ):
        return function
    made = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        defaults,
        tuple(map(_cell, changed)),
    )
    made.__kwdefaults__ = named
    made.__qualname__ = function.__qualname__
    return made


class _Empty:
    """Stands for a variable that has no value yet."""


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _Empty


def _cell(content: Any) -> types.CellType:
    return types.CellType() if content is _Empty else types.CellType(content)


def _is(one: Any, other: Any) -> bool:
    return one is other


def _inside(thing: Any) -> Iterator[Any]:
    if isinstance(thing, types.FunctionType):
        if not f"{thing.__module__}.".startswith(_LIBRARIES):
            yield from _seen_by(thing)
    elif isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, types.MethodType):
        yield from (thing.__func__, thing.__self__)
    elif isinstance(thing, types.BuiltinMethodType):
        yield thing.__self__  # as in `append = items.append`
    elif isinstance(thing, (list, tuple, set, frozenset, deque)):
        yield from thing
    elif isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, nn.Module):
        yield from _in_module(thing)
    elif hasattr(thing, "__dict__") or hasattr(type(thing), "__slots__"):
        yield from getattr(thing, "__dict__", {}).values()
        for name in _slots_of(type(thing)):
            yield getattr(thing, name, None)
        if not f"{type(thing).__module__}.".startswith(_LIBRARIES):
            yield vars(type(thing)).get("__call__")


def _is_ours(thing: Any) -> bool:
    """Return whether an object is recoup's own, such as the hooks of a region.

    They hold tensors of regions that have run, which no function sees through them.
    """
    return type(thing).__module__.startswith("recoup.engine.")


def _in_module(thing: nn.Module) -> Iterator[Any]:
    yield from thing.parameters()
    yield from thing.buffers()
    for module in thing.modules():
        yield from vars(module).values()
        yield getattr(type(module), "forward", None)


def _slots_of(kind: type) -> Iterator[str]:
    for part in kind.__mro__:
        names = vars(part).get("__slots__", ())
        listed = (names,) if isinstance(names, str) else names
        yield from (name for name in listed if not name.startswith("__"))


def _seen_by(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for name in _names_in(function.__code__):
        if name in function.__globals__:
            yield function.__globals__[name]


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)

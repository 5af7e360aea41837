"""Substitution: a copy of a function with some captured objects replaced."""

import copy
import functools
import types
from typing import Any

import torch

_LEAVES = (
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


def rebuilt(function: Any, others: dict[int, Any]) -> Any:
    """Return a function with some captured objects, by `id`, replaced.

    Nothing existing is changed: functions, containers and objects in between are copied
    where they differ. Globals are not replaced.

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
    if id(thing) in begun or isinstance(thing, _LEAVES):
        return begun.get(id(thing), thing)
    begun[id(thing)] = thing  # a recursive function keeps referring to itself
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
    """The content of a variable without a value."""


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _Empty


def _cell(content: Any) -> types.CellType:
    return types.CellType() if content is _Empty else types.CellType(content)


def _is(one: Any, other: Any) -> bool:
    return one is other

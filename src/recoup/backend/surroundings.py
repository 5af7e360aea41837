"""What a function can reach beside its arguments: modules and tensors."""

import functools
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_DEPTH = 4
"""How many functions, objects and containers are gone through, one in the other."""

_OBJECT_DEPTH = 2
"""Down to here objects are looked into: the function's own, those of its variables, and
of containers and partial arguments among these. Further down they are data."""

_ITEMS = 1000
"""Larger containers are data."""


def surroundings(*functions: object) -> tuple[list[nn.Module], list[Tensor]]:
    """Return the modules and tensors that functions refer to, each once.

    They are looked for in closures, globals, defaults, partial arguments, the object
    of a method, in what these objects hold, and in lists, tuples and dictionaries.

    Examples:
        >>> layer, x = nn.Linear(1, 1), nn.Parameter(nn.Linear(1, 1).bias)
        >>> modules, tensors = surroundings(lambda: layer(x))
        >>> modules == [layer], tensors[0] is x
        (True, True)
    """
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor] = {}
    seen: set[int] = set()
    waiting = [(thing, 0) for thing in functions]
    for thing, depth in waiting:
        if id(thing) in seen or depth > _DEPTH:
            continue
        seen.add(id(thing))
        if isinstance(thing, nn.Module):
            modules[id(thing)] = thing
        elif isinstance(thing, Tensor):
            tensors[id(thing)] = thing
        else:
            waiting += [(part, depth + 1) for part in _parts(thing, depth)]
    return list(modules.values()), list(tensors.values())


def _parts(thing: Any, depth: int) -> Iterator[object]:
    if isinstance(thing, functools.partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, MethodType):
        yield from (thing.__func__, thing.__self__)
        yield from _attributes(thing.__self__)
    elif isinstance(thing, FunctionType):
        yield from _variables(thing)
    elif isinstance(thing, list | tuple | dict) and len(thing) <= _ITEMS:
        yield from thing.values() if isinstance(thing, dict) else thing
    elif depth <= _OBJECT_DEPTH:
        yield from _attributes(thing)


def _variables(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # a variable that has no value yet
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield function.__globals__[name]
    yield from (function.__defaults__ or (), function.__kwdefaults__ or {})


def _attributes(thing: object) -> Iterator[object]:
    """Return what an object holds; what classes and modules of Python hold is code."""
    if not isinstance(thing, type | ModuleType):
        yield from getattr(thing, "__dict__", {}).values()

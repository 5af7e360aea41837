"""Find the objects that a function, a module or any other object can reach."""

import functools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from recoup.backend.compiler.recognition import uncompiled

_MOST_OBJECTS = 100_000
_MOST_ITEMS = 10_000
LEAVES = (
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    type(None),
    type,
    types.ModuleType,
    types.CodeType,
    torch.device,
    torch.dtype,
    torch.Size,
    Tensor,
)
"""Types of objects that are not walked into."""

_BASES = (list, tuple, set, frozenset, deque, OrderedDict, dict)
_LIBRARIES = frozenset(
    {"torch", "numpy", "jax", "jaxlib", "recoup"} | sys.stdlib_module_names
)
_OPAQUE = (
    *("logging.", "threading.", "multiprocessing.", "concurrent.", "asyncio."),
    *("torch._dynamo.", "torch._inductor.", "torch._guards.", "torch.fx."),
    "torch.distributed.",  # holds unsharded parameters, whose memory it frees and fills
    *("recoup.core.", "recoup.engine.", "recoup.planners.", "recoup.measurement."),
    *("recoup.report.", "recoup.fitting."),
)
"""Packages whose objects are not followed: they hold nothing that user code uses."""


HOOKS = frozenset(vars(nn.Module())) - {
    *("training", "_parameters", "_buffers", "_modules")
}
"""Attributes of every module that hold hooks and its compiled call."""


def reach(
    *things: object, kind: type | tuple[type, ...], through_code: bool = True
) -> list[Any]:
    """Return the objects of a kind reachable from things, each once, nearest first.

    Follows closures, globals that code names (including the code of comprehensions,
    generator expressions and inner functions), defaults, partial arguments, bound
    objects, methods that other methods name, decorated and compiled functions,
    containers, attributes and slots of objects, and submodules, attributes, hooks and
    `forward` of modules.

    Does not follow tensors (for their hooks, see `hooks_of`), weak references, globals
    and classes of torch, NumPy, JAX and the standard library, containers of more than
    10 000 items, and anything after the first 100 000 objects.

    Costs about a microsecond per visited object.

    Args:
        *things: The start objects, which are returned too if they are of the kind.
        kind: The classes to look for. `object` finds all but numbers, texts, classes
            and tensors.
        through_code: False follows only what objects hold, not what functions use: no
            closures, globals, defaults, methods or hooks.

    Examples:
        >>> layers = {"first": [nn.Tanh()]}
        >>> reach(functools.partial(map, layers["first"][0]), kind=nn.Module)
        [Tanh()]
    """
    walk = _Walk(through_code=through_code)
    wanted = () if kind is object else kind
    found: dict[int, Any] = {}
    # This list keeps visited objects alive, so that no id is reused.
    waiting: list[Any] = list(things)
    for place, thing in enumerate(waiting):
        if place >= _MOST_OBJECTS:
            break
        if id(thing) in walk.seen:
            continue
        walk.seen.add(id(thing))
        if isinstance(thing, kind):
            found[id(thing)] = thing
        if not isinstance(thing, LEAVES):
            waiting += [
                part for part in walk.parts(thing) if _is_followed(part, wanted)
            ]
    return list(found.values())


def variables_of(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and contents of a function's nonlocal and global variables.

    That is, closure cells with a value, and globals named in its code or in nested
    code.

    Examples:
        >>> scale = 3
        >>> def outer(shift):
        ...     return lambda xs: [x * shift for x in xs]
        >>> dict(variables_of(outer(2)))
        {'shift': 2}
    """
    if isinstance(function, functools.partial):
        yield from variables_of(function.func)
    elif isinstance(function, types.MethodType):
        yield from variables_of(function.__func__)
    elif isinstance(function, types.FunctionType):
        yield from _cells_of(function)
        yield from _globals_of(function)


def hooks_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the containers of a tensor's hooks, for `reach`."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return tuple(getattr(tensor, name, None) for name in names)


def attributes_of(thing: object) -> dict[str, Any]:
    """Return an object's own `__dict__`, or an empty dictionary.

    Examples:
        >>> attributes_of(3)
        {}
    """
    try:
        # Not `vars`, which an object can override.
        return object.__getattribute__(thing, "__dict__")
    except (AttributeError, TypeError):
        return {}


def slots_of(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    """Return the descriptors of the slots that a class and its bases define."""
    return tuple(
        value
        for part in kind.__mro__
        if "__slots__" in vars(part)
        for value in vars(part).values()
        if isinstance(value, types.MemberDescriptorType)
    )


def is_of_library(name: str) -> bool:
    """Return whether a module belongs to torch, NumPy, JAX, recoup or Python."""
    return name.partition(".")[0] in _LIBRARIES


def _is_library_code(function: types.FunctionType) -> bool:
    # A doctest runs in a copy of the library's namespace, but counts as user code.
    name = function.__globals__.get("__name__", "")
    module = sys.modules.get(name)
    is_copy = module is not None and vars(module) is not function.__globals__
    return is_of_library(name) and not is_copy


class _Walk:
    """The state of one search.

    Attributes:
        seen: The ids of visited objects.
    """

    def __init__(self, *, through_code: bool) -> None:
        self._through_code = through_code
        self.seen: set[int] = set()
        self._slots: dict[type, tuple[types.MemberDescriptorType, ...] | None] = {}
        self._called: set[tuple[type, str]] = set()

    def parts(self, thing: Any) -> Iterator[Any]:
        """Yield what an object leads to directly."""
        if isinstance(thing, types.FunctionType):
            yield from self._parts_of_function(thing) if self._through_code else ()
        elif isinstance(thing, nn.Module):
            for name, value in list(attributes_of(thing).items()):
                # Most hooks are empty dictionaries, which would dominate the walk.
                if name not in HOOKS or (self._through_code and value):
                    yield value
            yield from self._methods(type(thing), "forward")
        elif isinstance(thing, types.MethodType):
            yield from (thing.__self__, thing.__func__)
            # The function may be a partial without a name, as in torchao.
            name = getattr(thing.__func__, "__name__", "")
            yield from self._methods(type(thing.__self__), name)
        elif isinstance(thing, types.BuiltinMethodType | types.MethodWrapperType):
            yield thing.__self__  # as in `append = items.append`
        elif isinstance(thing, functools.partial):
            yield from (thing.func, thing.args, thing.keywords)
        elif isinstance(thing, types.GeneratorType):
            if self._through_code and thing.gi_frame is not None:
                yield from list(thing.gi_frame.f_locals.values())
        else:
            yield from _items_of(thing)
            yield from self._attributes(thing)

    def _parts_of_function(self, function: types.FunctionType) -> Iterator[Any]:
        inside = uncompiled(function)
        if inside is not function:
            yield inside
            return
        yield from (content for _, content in _cells_of(function))
        yield from (function.__defaults__, function.__kwdefaults__)
        yield from attributes_of(function).values()  # as `__wrapped__`
        # A library's function may decorate a user's; its globals are not user state.
        if not _is_library_code(function):
            for _, content in _globals_of(function):
                yield content
                if isinstance(content, types.ModuleType):
                    yield from _named_in_module(content, function.__code__)

    def _attributes(self, thing: Any) -> Iterator[Any]:
        kind = type(thing)
        if kind not in self._slots:
            opaque = f"{kind.__module__}.".startswith(_OPAQUE)
            self._slots[kind] = None if opaque else slots_of(kind)
        slots = self._slots[kind]
        if slots is None:
            return
        yield from list(attributes_of(thing).values())
        for slot in slots:
            try:
                yield slot.__get__(thing, kind)
            except AttributeError:
                continue  # an unset slot
        yield from self._methods(kind, "__call__")

    def _methods(self, kind: type, name: str) -> Iterator[Any]:
        """Yield a method, and the class attributes that it names, recursively."""
        waiting = [name] if self._through_code else []
        for each in waiting:
            if (kind, each) in self._called:
                continue
            self._called.add((kind, each))
            for part in kind.__mro__:
                if is_of_library(part.__module__) or each not in vars(part):
                    continue
                content = _function_in(vars(part)[each])
                yield content
                if isinstance(content, types.FunctionType):
                    waiting += _names_in(content.__code__)


def _is_followed(thing: Any, kind: type | tuple[type, ...]) -> bool:
    # Most visited objects are leaves: do not queue them.
    return not isinstance(thing, LEAVES) or isinstance(thing, kind)


def items_of(container: Any) -> list[Any]:
    """Return a container's items, for a dictionary its pairs.

    Does not call overridden methods, which may compute or import something.

    Examples:
        >>> items_of((1, 2)), items_of({1: 2})
        ([1, 2], [(1, 2)])
    """
    base = _base_of(container)
    return list((base.items if issubclass(base, dict) else base.__iter__)(container))


def is_large(container: Any) -> bool:
    """Return whether a container has too many items to follow."""
    return _base_of(container).__len__(container) > _MOST_ITEMS


def _base_of(container: Any) -> Any:
    return next(kind for kind in _BASES if isinstance(container, kind))


def _items_of(thing: Any) -> Iterator[Any]:
    if isinstance(thing, _BASES):
        held = () if is_large(thing) else items_of(thing)
        yield from chain(*held) if isinstance(thing, dict) else held
    elif isinstance(thing, types.MappingProxyType):
        if len(thing) <= _MOST_ITEMS:
            yield from list(thing)
            yield from list(thing.values())
    elif type(thing).__module__ == "numpy" and type(thing).__name__ == "ndarray":
        yield from thing.flat if thing.dtype.hasobject else ()


def _cells_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # an unset variable


def _globals_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name in _names_in(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _named_in_module(module: types.ModuleType, code: types.CodeType) -> Iterator[Any]:
    """Yield attributes of a module that code may use."""
    if not is_of_library(module.__name__):
        for name in _names_in(code):
            if name in vars(module):
                yield vars(module)[name]


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the global and attribute names in code and nested code."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # a comprehension or inner function
            names.update(dict.fromkeys(_names_in(constant)))
    return tuple(names)


def _function_in(attribute: Any) -> Any:
    """Return the function behind an attribute of a class, or the attribute."""
    if isinstance(attribute, staticmethod | classmethod):
        return attribute.__func__
    if isinstance(attribute, property):
        return attribute.fget
    if isinstance(attribute, functools.cached_property):
        return attribute.func
    return attribute

"""Detect side effects of a block's forward by observing one call.

A block may be called again in backward only if its code has no side effects. This
cannot be proved for all calls of Python code. So one call is observed for anything
suspicious: assigned attributes and globals, C functions that are not known to be pure,
and reachable objects, tensors and containers that differ after the call. In doubt, it
has a side effect.
"""

import dis
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recoup.backend.compiler.recognition import is_sharded
from recoup.backend.memory.storages import version_of
from recoup.backend.state.walk import attributes_of, reach
from recoup.core.restoring import restoring
from recoup.engine.applied.planned_runs import Cuts
from recoup.measurement.steps.training_step import TrainingStep
from recoup.measurement.tracing.observation import cut

_TORCH = str(Path(torch.__file__).parent)
_RECOUP = str(Path(__file__).parents[2])
_STANDARD = str(Path(dis.__file__).parent)

_ASSIGNING = frozenset({"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"})
_MAKING = frozenset({"__init__", "__new__", "__post_init__"})
"""Methods that assign attributes of a new object."""

_COMPUTING = frozenset(
    {
        *("math", "_operator", "itertools", "_functools", "_collections", "_abc"),
        *("_weakref", "_struct", "_bisect", "_heapq", "_typing", "_sre"),
    }
)
"""C modules whose functions are pure."""

_IMPURE_BUILTINS = frozenset(
    {
        *("print", "open", "input", "exec", "eval", "compile", "breakpoint"),
        *("setattr", "delattr", "__import__"),
    }
)
_READING = frozenset({"getrecursionlimit", "_getframe", "exc_info", "intern"})
"""Functions of `sys` that only read."""

_CONTAINERS = (list, dict, set, deque, OrderedDict)
_MUTATORS = frozenset(
    {
        *("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse"),
        *("update", "setdefault", "popitem", "add", "discard", "appendleft"),
        *("extendleft", "popleft", "rotate", "move_to_end", "__setitem__"),
        *("__delitem__", "intersection_update", "difference_update"),
        "symmetric_difference_update",
    }
)
_CONSTANTS = (str, bytes, int, float, complex, tuple, frozenset, range, slice, type)
_LAZY = (types.GeneratorType, types.MappingProxyType, types.FrameType, types.CodeType)


@lru_cache(maxsize=4096)
def _assigns(code: types.CodeType) -> bool:
    """Return whether code assigns attributes of objects that it did not create."""
    if code.co_name in _MAKING or code.co_filename.startswith(_STANDARD):
        return False
    return any(
        each.opname in _ASSIGNING and each.argval != "requires_grad"
        for each in dis.get_instructions(code)
    )


def _is_effect(function: Any) -> bool:
    """Return whether a C function may have side effects."""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "")
    home = owner.__name__ if isinstance(owner, types.ModuleType) else None
    if home is None and owner is None:
        home = getattr(function, "__module__", None) or ""
    if home is not None:
        if home == "builtins":
            return name in _IMPURE_BUILTINS
        if home == "sys":
            return name not in _READING
        return home not in _COMPUTING and home.partition(".")[0] != "torch"
    if isinstance(owner, (*_CONSTANTS, *_LAZY, *_CONTAINERS)):
        return False
    if isinstance(owner, ContextVar):
        return name != "get"
    return type(owner).__module__.partition(".")[0] not in ("torch", "builtins", "re")


def _writes_files(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    if isinstance(owner, types.ModuleType):
        return owner.__name__ == "builtins" and function.__name__ in ("print", "open")
    return type(owner).__module__ in ("_io", "io")


class _EffectWatch:
    """A profile function that observes the functions one call runs."""

    def __init__(self) -> None:
        self.found: str = ""
        self.changed: list[Any] = []

    def __call__(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if self.found or event not in ("call", "c_call"):
            return
        code = frame.f_code
        file = code.co_filename
        if file.startswith(_RECOUP):
            return
        in_torch = file.startswith(_TORCH)
        if event == "call":
            if not in_torch and _assigns(code):
                self.found = f"{code.co_qualname} assigns an attribute or a global"
        elif in_torch:
            if _writes_files(argument):
                self.found = f"{code.co_qualname} calls {_name_of(argument)}"
        elif _is_effect(argument):
            self.found = f"{code.co_qualname} calls {_name_of(argument)}"
        elif argument.__name__ in _MUTATORS:
            owner = getattr(argument, "__self__", None)
            if isinstance(owner, _CONTAINERS):
                self.changed.append(owner)


def _name_of(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{owner.__name__}.{name}" if isinstance(owner, types.ModuleType) else name


class _ReachedState:
    """The objects and tensors that a call can reach, with their state before it."""

    def __init__(self, *things: Any, through_code: bool) -> None:
        found = reach(*things, kind=object, through_code=through_code)
        self._contents = [(thing, _contents(thing)) for thing in found]
        held = (each for _, each in self._contents if each is not None)
        tensors = {id(t): t for each in held for t in each if isinstance(t, Tensor)}
        self._tensors = [(tensor, _state_of(tensor)) for tensor in tensors.values()]
        self.has_generator = any(isinstance(each, torch.Generator) for each in found)

    def change(self) -> str:
        """Describe the changes since; empty if there are none."""
        for thing, before in self._contents:
            if before is not None and not _same(before, _contents(thing)):
                return f"it changes an object of class {type(thing).__name__}"
        for tensor, before in self._tensors:
            if _state_of(tensor) != before:
                return f"it writes to a tensor of shape {tuple(tensor.shape)}"
        return ""


def _state_of(tensor: Tensor) -> tuple[int, bool]:
    return version_of(tensor), tensor.requires_grad


def _contents(thing: Any) -> Sequence[Any] | None:
    """Return the objects that an object refers to, or None if it is not compared."""
    if isinstance(thing, types.FunctionType | types.MethodType | types.GeneratorType):
        return None
    if isinstance(thing, tuple):
        return thing
    if isinstance(thing, dict | OrderedDict):
        return [*thing.keys(), *thing.values()]
    if isinstance(thing, list | set | deque):
        return list(thing)
    attributes = attributes_of(thing)
    return [*attributes.keys(), *attributes.values()] if attributes else None


def _same(before: Sequence[Any], after: Sequence[Any] | None) -> bool:
    return (
        after is not None
        and len(before) == len(after)
        and all(
            one is other
            or (
                (isinstance(one, int | float | str) and type(one) is type(other))
                and one == other
            )
            for one, other in zip(before, after, strict=True)
        )
    )


def call_and_look(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    through_code: bool = True,
) -> tuple[Any, str]:
    """Call a function; return its result and its first side effect in words, or "".

    Args:
        function: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        through_code: Whether to include closures and globals that its code refers to.

    Examples:
        >>> call_and_look(lambda x: x + 1, (1,), {})
        (2, '')
        >>> seen = []
        >>> call_and_look(lambda x: seen.append(x), (1,), {})[1]
        'it changes an object of class list'
    """
    reached = _ReachedState(function, args, kwargs, through_code=through_code)
    if reached.has_generator:
        return function(*args, **kwargs), "it has a random generator of its own"
    watch = _EffectWatch()
    before = sys.getprofile()
    with restoring(lambda: sys.setprofile(before)):
        sys.setprofile(watch)
        result = function(*args, **kwargs)
    return result, watch.found or reached.change() or _escaped(watch.changed, result)


def _escaped(changed: list[Any], result: Any) -> str:
    """Describe a changed container that outlives the call and is not its result."""
    returned = {id(each) for each in reach(result, kind=object, through_code=False)}
    counts: dict[int, int] = {}
    for each in changed:
        counts[id(each)] = counts.get(id(each), 0) + 1
    while changed:
        each = changed.pop()
        counts[id(each)] -= 1
        # References: this variable, `getrefcount`'s argument, and the list.
        is_alive = sys.getrefcount(each) > 2 + counts[id(each)]
        if is_alive and id(each) not in returned:
            return f"it changes a {type(each).__name__} that outlives it"
    return ""


def repeatable_blocks(step: TrainingStep, names: Iterable[str]) -> frozenset[str]:
    """Return the blocks of a step whose calls have no visible side effects.

    Costs one step at floor memory, several times slower than usual.
    """
    model = step.model
    blocks = {name: model.get_submodule(name) for name in names}
    plain = {name: block for name, block in blocks.items() if _is_plain(block)}
    effects = SideEffects()
    with cut(step, Cuts(tuple(blocks))), effects.looking(plain.items()):
        step.begin()
        step.run()
    return frozenset(name for name, why in effects.reasons.items() if not why)


def _is_plain(block: nn.Module) -> bool:
    """Return whether a block has no sharded or scripted modules or other parameters."""
    return not any(
        is_sharded(type(module)) or isinstance(module, torch.jit.ScriptModule)
        for module in block.modules()
    ) and all(type(each) is nn.Parameter for each in block.parameters())


class SideEffects:
    """Observes the calls of blocks for side effects.

    Attributes:
        reasons: For each called block, why it must not be called again; empty if
            nothing was found.
    """

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self._kinds: set[type[nn.Module]] = set()

    @contextmanager
    def looking(self, blocks: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
        """Observe the calls of blocks in the `with` block."""
        watched: list[nn.Module] = []

        def restore() -> None:
            for block in watched:
                block.__dict__.pop("forward", None)

        with restoring(restore):
            for name, block in blocks:
                if "forward" in block.__dict__:
                    self.reasons[name] = "its forward was replaced on the instance"
                    continue
                watched.append(block)
                block.__dict__["forward"] = partial(self.call, name, block)
            yield

    def call(self, name: str, block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Call a block's own forward, and record its side effects."""
        kind = type(block)
        is_new = kind not in self._kinds  # blocks of one class have the same code
        self._kinds.add(kind)
        forward = types.MethodType(kind.forward, block)
        result, reason = call_and_look(forward, args, kwargs, through_code=is_new)
        self.reasons[name] = self.reasons.get(name) or reason
        return result

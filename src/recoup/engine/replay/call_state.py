"""The state that a call reads besides its arguments, saved until it is repeated."""

import operator
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from recoup.backend.memory.ledger import tensor_bytes
from recoup.backend.memory.storages import (
    has_storage,
    storage_address,
    version_counter,
    version_of,
    writes_hidden,
)
from recoup.backend.state.snapshots import BufferSlot, buffer_slots, put_in_place
from recoup.backend.state.walk import (
    HOOKS,
    attributes_of,
    is_of_library,
    reach,
    variables_of,
)
from recoup.core.restoring import restoring
from recoup.engine.lifetime.values import changed_tensor
from recoup.engine.recording.region import STATE_BYTES
from recoup.errors import CaptureError, ChangedTensorError, MismatchError

_MISSING = object()
_PLAIN = (int, float, complex, str, bytes, bool, type(None))


class Captures:
    """The closure cells and globals that a function or its nested code names.

    Args:
        function: A function, method, partial or module.

    Examples:
        >>> def make():
        ...     i = 1
        ...     function = lambda x: x * i
        ...     seen = Captures(function)
        ...     i = 2
        ...     return function, seen
        >>> function, seen = make()
        >>> try:
        ...     seen.check("double")
        ... except CaptureError as error:
        ...     print(str(error)[:59])
        'double' is recomputed in backward, but its variable 'i' is
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._seen = dict(variables_of(function))
        self._versions = {
            name: version_of(content)
            for name, content in self._seen.items()
            if isinstance(content, Tensor)
        }

    def check(self, name: str) -> None:
        """Raise if a variable has changed.

        Args:
            name: The function's name, for the message.

        Raises:
            CaptureError: A variable refers to another object, or its tensor was changed
                in place.
        """
        now = dict(variables_of(self._function))
        for variable in self._seen | now:
            before = self._seen.get(variable, _MISSING)
            after = now.get(variable, _MISSING)
            if not _same(before, after):
                raise CaptureError(
                    f"{name!r} is recomputed in backward, but its variable "
                    f"{variable!r} is no longer what it was in forward (it was "
                    f"{_show(before)}, it is {_show(after)}). A function made in a "
                    "loop sees the loop variable's last value: pass it as an argument, "
                    "or bind it with a default as in `lambda x, "
                    f"{variable}={variable}: …`."
                )
            version = self._versions.get(variable)
            if isinstance(after, Tensor) and version_of(after) != version:
                raise CaptureError(
                    f"{name!r} is recomputed in backward, but the tensor {variable!r} "
                    "that it uses was changed in place. Change it after backward."
                )


def _same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    return (
        isinstance(before, _PLAIN) and type(before) is type(after) and before == after
    )


def _show(content: Any) -> str:
    if content is _MISSING:
        return "nothing"
    return repr(content) if isinstance(content, _PLAIN) else type(content).__name__


_STEADY: MutableMapping[Tensor, set[Hashable]] = WeakIdKeyDictionary()
"""Large buffers, with the keys of calls that did not write to them."""

_COPIES: MutableMapping[Tensor, tuple[int, weakref.ref[Tensor]]] = WeakIdKeyDictionary()
"""Large buffers, each with a version and a weak reference to a copy of that version."""


class KeptBuffers:
    """The buffers of modules at the start of a call.

    Small ones are copied, because kernels such as batch normalization's bypass the
    version counters of running statistics. Large ones are also copied, until a backward
    finds them unchanged; from then on their versions are compared instead.

    Args:
        modules: The modules.
        key: The identity of the call.
        small_bytes: The largest size of a small buffer.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        key: Hashable,
        *,
        small_bytes: int = STATE_BYTES,
    ) -> None:
        self._modules = modules
        # Buffers that training updates may be constant in evaluation.
        self._key = (key, tuple(module.training for module in modules))
        self._slots = buffer_slots(modules)
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._versions: list[tuple[str, Tensor, int]] = []
        for name, buffer in _named(self._slots):
            if tensor_bytes(buffer) <= small_bytes:
                self._copies.append((buffer, buffer.detach().clone()))
                continue
            self._versions.append((name, buffer, version_of(buffer)))
            if not self._is_steady(buffer):
                self._copies.append((buffer, _shared_copy(buffer)))
        copied = (buffer for buffer, _ in self._copies)
        self._addresses = {storage_address(b) for b in copied if has_storage(b)}

    @contextmanager
    def as_before(self, caller: str) -> Iterator[None]:
        """Run the block with the buffers at the start of the call, then restore them.

        Args:
            caller: The name of the recomputed function, for messages.

        Raises:
            ChangedTensorError: A buffer without a copy has changed.
            MismatchError: The block changed a buffer that the first call did not.
        """
        self._classify(caller)
        slots = buffer_slots(self._modules)
        contents = [(b, b.detach().clone()) for b, _ in self._copies]
        # Hidden from autograd: buffers that it saved are restored afterwards.
        with writes_hidden(buffer for buffer, _ in self._copies):

            def restore() -> None:
                put_in_place(slots)
                _set_all(contents)

            with restoring(restore):
                put_in_place(self._slots)
                _set_all(self._copies)
                yield
        written = self._written_uncopied()
        if written is not None:
            raise MismatchError(
                f"{caller!r} wrote to the buffer {written!r} when it was called again "
                "in backward, but not in forward. A recomputed function must do "
                "the same both times."
            )

    def are_behind(self, tensor: Tensor) -> bool:
        """Return whether a tensor shares memory with a buffer that is restored."""
        return has_storage(tensor) and storage_address(tensor) in self._addresses

    def _classify(self, caller: str) -> None:
        """Record which large buffers were unchanged and need no copy next time."""
        written = self._written_uncopied()
        for _, buffer, version in self._versions:
            calls = _STEADY.setdefault(buffer, set())
            if version_of(buffer) == version >= 0:
                calls.add(self._key)
            else:
                calls.discard(self._key)
        if written is not None:
            raise ChangedTensorError(
                f"{caller!r} is recomputed in backward, but the buffer {written!r} is "
                "no longer what it was when it was called: it was written to, by the "
                "call or after it. It is large and was not written to before, so there "
                "is no copy. From now on it is copied: run this step again. To do "
                "without, write to the buffer outside of what is recomputed, after "
                "backward."
            )

    def _written_uncopied(self) -> str | None:
        """Return the name of a buffer that has changed and was not copied."""
        copied = {id(buffer) for buffer, _ in self._copies}
        for name, buffer, version in self._versions:
            if id(buffer) not in copied and version_of(buffer) != version:
                return name
        return None

    def _is_steady(self, buffer: Tensor) -> bool:
        return self._key in _STEADY.get(buffer, set())


def _named(slots: list[BufferSlot]) -> list[tuple[str, Tensor]]:
    """Return the buffers of slots, each once, with a name."""
    found = {id(buffer): (name, buffer) for _, name, buffer in slots}
    return [(name, buffer) for name, buffer in found.values() if buffer is not None]


def _shared_copy(buffer: Tensor) -> Tensor:
    """Return a copy of a buffer, shared by all calls that need the same version."""
    version = version_of(buffer)
    known = _COPIES.get(buffer)
    copy = known[1]() if known is not None and known[0] == version >= 0 else None
    if copy is None:
        copy = buffer.detach().clone()
        _COPIES[buffer] = (version, weakref.ref(copy))
    return copy


def _set_all(contents: list[tuple[Tensor, Tensor]]) -> None:
    # Through `.data`, so that autograd does not count it as a change.
    with torch.no_grad():
        for buffer, content in contents:
            buffer.data.copy_(content)


class CallState(Protocol):
    """The state that one call has read besides its arguments."""

    def settle(self) -> None:
        """Record the versions of parameters at the end of the first call."""
        ...

    def check(self, name: str) -> None:
        """Raise if something has changed that cannot be restored."""
        ...

    def as_before(self, name: str) -> AbstractContextManager[object]:
        """Run the block with the state at the start of the first call."""
        ...

    has_buffers: bool

    def are_behind(self, tensor: Tensor) -> bool:
        """Return whether a tensor shares memory with a buffer that is restored."""
        ...


class FunctionState:
    """The variables, modules, parameters and buffers that any function can reach.

    Args:
        original: The user's function, uncompiled and without wrappers.
        call: The called function and its arguments, in which modules are searched.
        key: The function's identity.
    """

    has_buffers = True

    def __init__(self, original: Any, call: tuple[Any, ...], key: Hashable) -> None:
        self._captures = Captures(original)
        self._modules: list[nn.Module] = reach(original, *call, kind=nn.Module)
        self._buffers = KeptBuffers(self._modules, key)
        self._versions: list[tuple[Tensor, int]] = []

    def settle(self) -> None:
        """Record the versions of parameters at the end of the first call."""
        self._versions = [
            (parameter, version_of(parameter))
            for module in self._modules
            for parameter in module.parameters(recurse=False)
        ]
        self._modules = []

    def are_behind(self, tensor: Tensor) -> bool:
        """Return whether a tensor shares memory with a buffer that is restored."""
        return self._buffers.are_behind(tensor)

    def as_before(self, name: str) -> AbstractContextManager[object]:
        """Run the block with the buffers at the start of the first call."""
        return self._buffers.as_before(name)

    def check(self, name: str) -> None:
        """Raise if a variable or a parameter has changed."""
        self._captures.check(name)
        _check_versions(self._versions, name)


def _check_versions(versions: list[tuple[Tensor, int]], name: str) -> None:
    for parameter, version in versions:
        if version_of(parameter) != version:
            raise changed_tensor(
                parameter,
                repr(name),
                "was changed in place before backward (it is at version "
                f"{version_of(parameter)}, forward used version {version})",
            )


_Namespace = dict[Any, Any] | list[Any]
_Reader = Callable[[Any], tuple[Any, ...]]


class BlockView:
    """The namespaces that a block's forward reads: module attributes and variables.

    Those of the modules, of the objects in them, and of the objects in these, as far as
    they are no library's and not large. Found once, so that copying their contents at
    each call takes microseconds.
    """

    def __init__(self, block: nn.Module) -> None:
        self.modules = list(block.modules())
        self.has_buffers = any(attributes_of(m)["_buffers"] for m in self.modules)
        self._namespaces: list[dict[Any, Any]] = []
        self._lists: list[list[Any]] = []
        self._parameters: list[dict[str, Any]] = []
        hooks: list[dict[Any, Any]] = []
        found: list[Any] = []
        seen: set[int] = set()
        for module in self.modules:
            attributes = attributes_of(module)
            self._add(attributes, seen)
            self._parameters.append(attributes["_parameters"])
            for name, value in attributes.items():
                if name in HOOKS:
                    hooks += [value] if isinstance(value, dict) else []
                elif getattr(type(value), "belongs_to_plan", False):
                    continue
                elif name not in _REGISTRIES:
                    found.append(value)
                elif value:
                    self._add(value, seen)
        self._follow(found, seen)
        self._sized: list[Any] = [*self._namespaces, *self._lists, *hooks]
        self._size = sum(map(len, self._sized))
        self._hooks = [each for each in hooks if each]
        self._hook_numbers = list(map(tuple, self._hooks))
        function: Any = type(block).forward
        self._globals: dict[str, Any] = getattr(function, "__globals__", {})
        self._names = [n for n, _ in variables_of(function) if n in self._globals]
        self._readers: list[tuple[_Reader, _Namespace]] = [
            (_reader(space), space) for space in self._namespaces
        ]
        self._readers += [(tuple, space) for space in self._lists]
        self._known = self._identities()
        # An object that dies leaves its identity to the next one.
        self._alive = [_without_tensors(read(space)) for read, space in self._readers]

    def _add(self, space: _Namespace, seen: set[int]) -> bool:
        """Add a namespace; return whether it is a new one."""
        if id(space) in seen:
            return False
        seen.add(id(space))
        if isinstance(space, dict):
            self._namespaces.append(space)
        else:
            self._lists.append(space)
        return True

    def _follow(self, values: list[Any], seen: set[int]) -> None:
        """Add the namespaces of attributes' values, and of what these refer to."""
        attributes = len(values)
        for place, value in enumerate(values):
            is_far = place >= attributes
            if isinstance(value, tuple):
                values += value[:_MOST_ITEMS]
                continue
            if isinstance(value, dict | list):
                space = value
            elif isinstance(value, _LEAVES) or (
                is_far and is_of_library(type(value).__module__)
            ):
                continue
            else:
                space = attributes_of(value)
                if not space:
                    continue
            if is_far and len(space) > _MOST_ITEMS:
                continue
            if self._add(space, seen) and len(values) < attributes + _MOST_FOLLOWED:
                values += space.values() if isinstance(space, dict) else space

    def _identities(self) -> list[list[int]]:
        return [list(map(id, values_of(space))) for values_of, space in self._readers]

    @property
    def is_current(self) -> bool:
        """Whether no attribute, item or hook was added or removed, and no object.

        Numbers, tensors and other constants may be replaced: each call copies them.
        """
        if sum(map(len, self._sized)) != self._size:
            return False
        if self._hooks and list(map(tuple, self._hooks)) != self._hook_numbers:
            return False
        try:
            now = self._identities()
        except KeyError:  # one was removed and another one added
            return False
        if now == self._known:
            return True
        changed: dict[int, list[Any]] = {}
        for place, (new, old) in enumerate(zip(now, self._known, strict=True)):
            if new == old:
                continue
            if len(new) != len(old):  # an item went from one list to another
                return False
            values_of, space = self._readers[place]
            values = values_of(space)
            for value, one, other in zip(values, new, old, strict=True):
                if one != other and not _is_constant(value):
                    return False
            changed[place] = _without_tensors(values)
        self._known = now
        for place, values in changed.items():
            self._alive[place] = values
        return True

    def contents(self) -> "_Contents":
        """Return copies of all namespaces and the values of global variables."""
        return (
            list(map(dict.copy, self._namespaces)),
            list(map(list.copy, self._lists)),
            list(map(self._globals.get, self._names)),
        )

    def parameters(self) -> list[Tensor]:
        """Return the modules' current parameters."""
        return [
            p for space in self._parameters for p in space.values() if p is not None
        ]

    def check_variables(self, before: list[Any], name: str) -> None:
        """Raise `CaptureError` if a global variable of forward has changed."""
        for variable, old in zip(self._names, before, strict=True):
            if self._globals.get(variable) is not old:
                raise CaptureError(
                    f"{name!r} is recomputed in backward, but the global variable "
                    f"{variable!r} that it uses is no longer what it was in forward. "
                    "Change it after backward."
                )

    def changes(self, before: "_Contents") -> list[tuple[_Namespace, _Namespace]]:
        """Return the changed namespaces with their earlier contents."""
        # Inlined: a call for each takes longer than the comparison.
        named: list[tuple[_Namespace, _Namespace]] = [
            (space, old)
            for space, old in zip(self._namespaces, before[0], strict=True)
            if len(space) != len(old)
            or not all(map(operator.is_, space.values(), old.values()))
        ]
        listed = [
            (space, old)
            for space, old in zip(self._lists, before[1], strict=True)
            if len(space) != len(old) or not all(map(operator.is_, space, old))
        ]
        return [*named, *listed]


_Contents = tuple[list[dict[Any, Any]], list[list[Any]], list[Any]]


_LEAVES = (
    *(str, bytes, int, float, complex, type(None), type),
    *(Tensor, nn.Module, torch.device, torch.dtype, torch.Size, FunctionType),
)
"""Types of attributes that are compared by identity, not by their contents."""

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_MOST_ITEMS = 256
"""Larger containers are not followed, unless they are attributes of a module."""

_MOST_FOLLOWED = 2000
"""How many objects are looked at besides the attributes of modules."""


def _reader(space: dict[Any, Any]) -> _Reader:
    """Return a function that reads the items of a dictionary which are no hooks."""
    if type(space) is not dict:  # its own methods may do anything
        return lambda other: tuple(dict.values(other))
    names = [name for name in space if name not in HOOKS]
    # Of one name alone it would return no tuple.
    return operator.itemgetter(*names, names[0]) if names else lambda _: ()


def _without_tensors(values: Iterable[Any]) -> list[Any]:
    """Return the values that may be kept alive: they take no memory of a device."""
    return [value for value in values if not isinstance(value, Tensor)]


def _is_constant(value: Any) -> bool:
    """Return whether a call reads nothing of a value that may change."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, _LEAVES) and not isinstance(value, nn.Module)


def _fill(space: _Namespace, contents: _Namespace) -> None:
    if isinstance(space, dict):
        for name in [name for name in space if name not in contents]:
            del space[name]
        space.update(contents)
    else:
        space[:] = contents


_COUNTER_BYTES = 4096
"""Buffers of a block are copied up to this size. Its observed forward wrote to none, so
larger ones are copied only in the first calls."""


class BlockState:
    """The state of modules and variables that one call of a block has read.

    Attributes and items that were assigned since are restored for the second call.
    """

    def __init__(self, view: BlockView, key: Hashable) -> None:
        self._view = view
        self._contents = view.contents()
        self._parameters: list[Tensor] = []
        self._versions: list[int] = []
        self.has_buffers = view.has_buffers
        self._buffers: KeptBuffers | None = None
        if view.has_buffers:
            modules = view.modules
            self._buffers = KeptBuffers(modules, key, small_bytes=_COUNTER_BYTES)

    def settle(self) -> None:
        """Record the versions of parameters at the end of the first call."""
        self._parameters = self._view.parameters()
        self._versions = list(map(version_counter, self._parameters))

    def check(self, name: str) -> None:
        """Raise if a variable or a parameter has changed."""
        self._view.check_variables(self._contents[2], name)
        if list(map(version_counter, self._parameters)) != self._versions:
            pairs = zip(self._parameters, self._versions, strict=True)
            _check_versions(list(pairs), name)

    def are_behind(self, tensor: Tensor) -> bool:
        """Return whether a tensor shares memory with a buffer that is restored."""
        return self._buffers is not None and self._buffers.are_behind(tensor)

    def as_before(self, name: str) -> AbstractContextManager[object]:
        """Run the block with attributes and buffers at the start of the first call."""
        changes = self._view.changes(self._contents)
        if not changes and self._buffers is None:
            return nullcontext()
        return self._restored(changes, name)

    @contextmanager
    def _restored(
        self, changes: list[tuple[_Namespace, _Namespace]], name: str
    ) -> Iterator[None]:
        now = [(space, space.copy()) for space, _ in changes]

        def restore() -> None:
            for space, contents in now:
                _fill(space, contents)

        with restoring(restore):
            for space, contents in changes:
                _fill(space, contents)
            with (
                nullcontext()
                if self._buffers is None
                else (self._buffers.as_before(name))
            ):
                yield

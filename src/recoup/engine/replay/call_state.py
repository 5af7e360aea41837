"""What a call reads besides its arguments, kept until the call is repeated."""

import operator
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recoup.backend.memory.storages import version_counter, version_of
from recoup.backend.state.walk import HOOKS, attributes_of, reach, variables_of
from recoup.core.restoring import restoring
from recoup.engine.lifetime.values import changed_tensor
from recoup.engine.replay.captured_variables import Captures
from recoup.engine.replay.kept_buffers import KeptBuffers
from recoup.errors import CaptureError


class CallState(Protocol):
    """What one call has read besides its arguments."""

    def settle(self) -> None:
        """Note the versions of parameters: the first call has ended."""
        ...

    def check(self, name: str) -> None:
        """Raise if something has changed that cannot be restored."""
        ...

    def as_before(self, name: str) -> AbstractContextManager[object]:
        """Run the block with everything as the first call found it."""
        ...

    has_buffers: bool

    def are_behind(self, tensor: Tensor) -> bool:
        """Return whether a tensor shares memory with a buffer that is restored."""
        ...


class FunctionState:
    """The variables, modules, parameters and buffers that any function can reach.

    Args:
        original: The function as its author wrote it.
        call: The function that is called, and its arguments: where to look.
        key: What tells the function from others.
    """

    has_buffers = True

    def __init__(self, original: Any, call: tuple[Any, ...], key: Hashable) -> None:
        self._captures = Captures(original)
        self._modules: list[nn.Module] = reach(original, *call, kind=nn.Module)
        self._buffers = KeptBuffers(self._modules, key)
        self._versions: list[tuple[Tensor, int]] = []

    def settle(self) -> None:
        """Note the versions of parameters: the first call has ended."""
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
        """Run the block with buffers as the first call found them."""
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


class BlockView:
    """Where the forward of a block looks: its modules' attributes and its variables.

    Found once, so that keeping their contents in each call takes microseconds.

    Args:
        block: The block.
    """

    def __init__(self, block: nn.Module) -> None:
        self.modules = list(block.modules())
        self.has_buffers = any(attributes_of(m)["_buffers"] for m in self.modules)
        self._namespaces: list[dict[Any, Any]] = []
        self._lists: list[list[Any]] = []
        self._parameters: list[dict[str, Any]] = []
        hooks: list[dict[Any, Any]] = []
        seen: set[int] = set()
        for module in self.modules:
            attributes = attributes_of(module)
            self._add(attributes, seen)
            self._parameters.append(attributes["_parameters"])
            for name, value in attributes.items():
                if name in HOOKS:
                    hooks += [value] if isinstance(value, dict) else []
                elif isinstance(value, dict | list):
                    self._add(value, seen)
                elif not isinstance(value, _LEAVES):
                    self._add(attributes_of(value), seen)
        self._sized: list[Any] = [*self._namespaces, *self._lists, *hooks]
        self._size = sum(map(len, self._sized))
        function: Any = type(block).forward
        self._globals: dict[str, Any] = getattr(function, "__globals__", {})
        self._names = [n for n, _ in variables_of(function) if n in self._globals]

    def _add(self, space: _Namespace, seen: set[int]) -> None:
        if space and id(space) not in seen:
            seen.add(id(space))
            if isinstance(space, dict):
                self._namespaces.append(space)
            else:
                self._lists.append(space)

    @property
    def is_current(self) -> bool:
        """Whether no attribute, item or hook was added to the block or removed."""
        return sum(map(len, self._sized)) == self._size

    def contents(self) -> "_Contents":
        """Return copies of all namespaces, and the values of the global variables."""
        return (
            list(map(dict.copy, self._namespaces)),
            list(map(list.copy, self._lists)),
            list(map(self._globals.get, self._names)),
        )

    def parameters(self) -> list[Tensor]:
        """Return the parameters that the modules have now."""
        return [
            p for space in self._parameters for p in space.values() if p is not None
        ]

    def check_variables(self, before: list[Any], name: str) -> None:
        """Raise `CaptureError` if a global variable of forward has another value."""
        for variable, old in zip(self._names, before, strict=True):
            if self._globals.get(variable) is not old:
                raise CaptureError(
                    f"{name!r} is recomputed in backward, but the global variable "
                    f"{variable!r} that it uses is no longer what it was in forward. "
                    "Change it after backward."
                )

    def changes(self, before: "_Contents") -> list[tuple[_Namespace, _Namespace]]:
        """Return the namespaces that have other contents than before, with those."""
        # Written out: a call for each takes longer than the comparison.
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
"""Attributes that are compared as they are, not by what is in them."""


def _fill(space: _Namespace, contents: _Namespace) -> None:
    if isinstance(space, dict):
        for name in [name for name in space if name not in contents]:
            del space[name]
        space.update(contents)
    else:
        space[:] = contents


_COUNTER_BYTES = 4096
"""Buffers of a block are copied up to this size. Its forward was seen to write to none,
so that larger ones are copied only in the first calls."""


class BlockState:
    """What one call of a block has read of its modules and variables.

    Attributes that were assigned since are put back for the second call. A change
    inside an object that is two attributes away is not seen.

    Args:
        view: Where the block looks.
        key: What tells the block from others.
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
        """Note the versions of parameters: the first call has ended."""
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
        """Run the block with attributes and buffers as the first call found them."""
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

"""Captures: the variables a function sees, remembered to notice that they moved on."""

import functools
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from recoup.backend.reachable import reachable_modules
from recoup.backend.storages import version_of
from recoup.core.errors import CaptureError

_MISSING = object()
_PLAIN = (int, float, complex, str, bytes, bool, type(None))


class Captures:
    """What a function refers to by name: closure cells and globals.

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
        ...     print(str(error)[:58])
        'double' is run again in backward, but its variable 'i' is
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._seen = dict(_variables(function))
        self._versions = {
            name: version_of(content)
            for name, content in self._seen.items()
            if isinstance(content, Tensor)
        }

    def modules(self, *given: object) -> list[nn.Module]:
        """Return the modules that the function, and what it is given, lead to."""
        return reachable_modules(self._function, *given)

    def check(self, name: str) -> None:
        """Raise if a variable now refers to something else.

        Args:
            name: The function's name, for the message.

        Raises:
            CaptureError: Names the variable.
        """
        now = dict(_variables(self._function))
        for variable, before in self._seen.items():
            after = now.get(variable, _MISSING)
            if not _same(before, after):
                raise CaptureError(
                    f"{name!r} is run again in backward, but its variable "
                    f"{variable!r} is no longer what it was in forward (it was "
                    f"{_show(before)}, it is {_show(after)}). A function made in a "
                    "loop sees the loop variable's last value: pass it as an argument, "
                    "or bind it with a default as in `lambda x, "
                    f"{variable}={variable}: …`."
                )
            version = self._versions.get(variable)
            if isinstance(after, Tensor) and version_of(after) != version:
                raise CaptureError(
                    f"{name!r} is run again in backward, but the tensor {variable!r} "
                    "that it uses was changed in place. Change it after backward."
                )


def _variables(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, functools.partial):
        yield from _variables(function.func)
    elif isinstance(function, MethodType):
        yield from _variables(function.__func__)
    elif isinstance(function, FunctionType):
        code = function.__code__
        for name, cell in zip(
            code.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                yield name, cell.cell_contents
            except ValueError:
                yield name, _MISSING
        for name in code.co_names:
            if name in function.__globals__:
                yield name, function.__globals__[name]


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

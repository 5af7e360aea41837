"""Functions of recoup that call user code: exceptions raised there are the user's."""

import inspect
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_CODES: set[CodeType] = set()


def calls_user(function: Function) -> Function:
    """Mark a function that calls the user's model, loss, optimizer or backward.

    Apply it directly to the function, below other decorators. No cost per call.

    Examples:
        >>> import sys
        >>> @calls_user
        ... def run(step):
        ...     return step()
        >>> run(lambda: is_calling_user(sys._getframe(1)))
        True
    """
    _CODES.add(function.__code__)
    return function


def is_calling_user(frame: FrameType) -> bool:
    """Return whether a frame runs a function marked by `calls_user`."""
    return frame.f_code in _CODES


_LIBRARIES = ("recoup", "torch")


def user_stacklevel() -> int:
    """Return the `stacklevel` for a warning about the code that called the library.

    Examples:
        >>> user_stacklevel() >= 1
        True
    """
    frame = inspect.currentframe()
    level = 0
    while frame is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
        level += 1
    return max(level, 1)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES

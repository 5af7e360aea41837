"""Functions of ours that call the user's code: what is raised there is the user's."""

import inspect
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_CODES: set[CodeType] = set()


def calls_user(function: Function) -> Function:
    """Mark a function that calls a model, a loss, an optimizer or backward of a user's.

    Next to the function itself, below other decorators. Costs nothing when it runs.

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
    """Return whether a frame is of a function that was marked so."""
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

"""Faults: whether an error during a step is due to the user's code or to recoup."""

import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FrameType
from typing import Any

from recoup.backend.memory.meters import is_out_of_memory
from recoup.cli.statuses import TARGET, CommandError
from recoup.cli.targets import Target, first_line
from recoup.core.callers import is_calling_user
from recoup.errors import RecoupError

_RECORDERS = frozenset(
    {"recoup.engine.recording.recorder", "recoup.backend.operators.dispatch"}
)
"""Modules in which recoup runs the operators of a step itself."""

_REFUSALS = (RuntimeError, IndexError)
"""Errors that operators raise for wrong arguments."""


@contextmanager
def blaming_step(target: Target) -> Generator[None]:
    """Turn an error of the user's own step into a `CommandError` with one sentence.

    Errors of recoup, and errors that recoup may have caused, pass unchanged. So do
    out-of-memory errors, which have their own advice.

    Raises:
        CommandError: The step of the target raised, or tried to exit.
    """
    try:
        yield
    except RecoupError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error) or not is_of_step(error, target.step):
            raise
        notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
        raise CommandError(
            f"the step of {target.name} raised {type(error).__name__}: "
            f"{first_line(error)}.{notes} Run the step without recoup to see where, "
            "or give --debug.",
            status=TARGET,
        ) from error


def is_of_step(error: BaseException, step: Callable[[], object] | None = None) -> bool:
    """Return whether an error comes from the user's step, by its traceback.

    It does if recoup called the step and the last frame is not recoup's own. An
    operator that refuses its arguments is the step's, even where recoup runs it.

    Examples:
        >>> try:
        ...     [].pop()
        ... except IndexError as error:
        ...     is_of_step(error)
        False
        >>> is_of_step(SystemExit())
        True
    """
    if isinstance(error, SystemExit):
        return True  # recoup raises none
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    code = _code_of(step)
    if not any(is_calling_user(frame) or frame.f_code is code for frame in frames):
        return False
    last = frames[-1]
    refused = isinstance(error, _REFUSALS) and _module_of(last) in _RECORDERS
    return refused or is_calling_user(last) or not _is_ours(last)


def _is_ours(frame: FrameType) -> bool:
    return _module_of(frame).partition(".")[0] == "recoup"


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _code_of(function: Any) -> CodeType | None:
    while isinstance(function, partial):
        function = function.func
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    return getattr(function, "__code__", None)

"""Captures: the variables a function sees, remembered to notice that they moved on."""

from typing import Any

from torch import Tensor

from recoup.backend.memory.storages import version_of
from recoup.backend.state.walk import variables_of
from recoup.errors import CaptureError

_MISSING = object()
_PLAIN = (int, float, complex, str, bytes, bool, type(None))


class Captures:
    """The closure cells and globals that a function, or code inside of it, names.

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
        """Raise if a variable now refers to something else.

        Args:
            name: The function's name, for the message.

        Raises:
            CaptureError: Names the variable.
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

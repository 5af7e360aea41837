"""Readings: what may come out of a file that anybody may have written.

Text from a file is shown in terminals and pages, and amounts are added up and drawn:
neither is to do more than that.
"""

import json
from typing import Any, TypeGuard, cast

from recoup.errors import PlanError

MOST = 1 << 63
"""More bytes, seconds or counts than any machine has; sums of them are still finite."""


def is_printable(found: Any) -> TypeGuard[str]:
    r"""Return whether something is text that a terminal shows and does not obey.

    Examples:
        >>> is_printable("h.0.größe"), is_printable(""), is_printable(3)
        (True, True, False)
        >>> is_printable("\x1b[2J"), is_printable("a\nb"), is_printable("\ud800")
        (False, False, False)
    """
    return isinstance(found, str) and found.isprintable()


def is_amount(found: Any) -> TypeGuard[int]:
    """Return whether something is a whole number of bytes, or a count.

    Examples:
        >>> is_amount(0), is_amount(-5), is_amount(10**400), is_amount(True)
        (True, False, False, False)
    """
    is_whole = isinstance(found, int) and not isinstance(found, bool)
    return is_whole and 0 <= found <= MOST


def is_duration(found: Any) -> TypeGuard[float]:
    """Return whether something is a number of seconds.

    Examples:
        >>> is_duration(0.5), is_duration(2), is_duration(-1.0), is_duration(1e300)
        (True, True, False, False)
        >>> is_duration(float("nan")), is_duration(True)
        (False, False)
    """
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return is_number and 0 <= found <= MOST


ADVICE = "Make it anew with recoup.fit(...).plan.to_json()."


class PlanReader:
    """Reads typed fields of a plan from a file.

    Raises:
        PlanError: The part, or a field that is read, is no such thing.
    """

    def __init__(self, data: Any, what: str) -> None:
        if not isinstance(data, dict):
            raise PlanError(f"this plan is damaged: {what} is no object. {ADVICE}")
        self._data = cast("dict[str, Any]", data)

    @classmethod
    def of_file(cls, text: str, file_format: str, version: int) -> "PlanReader":
        """Return a reader of a whole file of a format and version."""
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise PlanError(f"this is no plan of recoup: {error}. {ADVICE}") from error
        reader = cls(data, "the file")
        given = reader.text("format")
        if given != file_format:
            raise PlanError(
                f"this is no plan of recoup: expected a {file_format!r}, got "
                f"{given!r:.60}. {ADVICE}"
            )
        found = reader.number("version")
        if found != version:
            raise PlanError(
                f"this plan is of version {found}, this recoup reads version "
                f"{version}. {ADVICE}"
            )
        return reader

    def text(self, name: str) -> str:
        """Return a field of printable text."""
        found = self._field(name, str)
        if not is_printable(found):
            raise damaged(name, found)
        return found

    def number(self, name: str, *, default: int | None = None) -> int:
        """Return a field of bytes, or a count."""
        if default is not None and name not in self._data:
            return default
        found = self._field(name, int)
        if not is_amount(found):
            raise damaged(name, found)
        return found

    def real(self, name: str) -> float:
        """Return a field of seconds."""
        found = self._field(name, (int, float))
        if not is_duration(found):
            raise damaged(name, found)
        return float(found)

    def has(self, name: str) -> bool:
        """Return whether there is a field."""
        return name in self._data

    def items(self, name: str) -> list[Any]:
        """Return the items of a field that is a list."""
        return cast("list[Any]", self._field(name, list))

    def part(self, name: str) -> dict[str, Any]:
        """Return a field that is an object."""
        return cast("dict[str, Any]", self._field(name, dict))

    def _field(self, name: str, kind: Any) -> Any:
        if name not in self._data:
            raise PlanError(f"this is no plan of recoup: {name} is missing. {ADVICE}")
        found = self._data[name]
        if not isinstance(found, kind):
            raise PlanError(
                f"this plan is damaged: {name} is {type(found).__name__}. {ADVICE}"
            )
        return found


def damaged(what: str, found: object) -> PlanError:
    """Return the error for a part of a plan that no plan has."""
    return PlanError(
        f"this plan is damaged: {what} is {found!r:.60}, where names can be printed "
        f"and amounts are from 0 to {MOST}. {ADVICE}"
    )

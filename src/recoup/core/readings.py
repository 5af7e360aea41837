"""Readings: checked data from untrusted files.

Text from a file is shown in terminals and pages, and amounts are added up and drawn;
neither must do anything else.
"""

import dataclasses
import json
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import (
    Any,
    NewType,
    TypeGuard,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from recoup.errors import PlanError, RecoupError

Signed = NewType("Signed", int)
"""A number that may be negative."""

Data = TypeVar("Data")

MOST = 1 << 63
"""More bytes, seconds or counts than any machine has; their sums are still finite."""


def is_printable(found: Any) -> TypeGuard[str]:
    r"""Return whether an object is text without control characters.

    Examples:
        >>> is_printable("h.0.größe"), is_printable(""), is_printable(3)
        (True, True, False)
        >>> is_printable("\x1b[2J"), is_printable("a\nb"), is_printable("\ud800")
        (False, False, False)
    """
    return isinstance(found, str) and found.isprintable()


def is_amount(found: Any) -> TypeGuard[int]:
    """Return whether an object is a whole number of bytes, or a count.

    Examples:
        >>> is_amount(0), is_amount(-5), is_amount(10**400), is_amount(True)
        (True, False, False, False)
    """
    is_whole = isinstance(found, int) and not isinstance(found, bool)
    return is_whole and 0 <= found <= MOST


def is_duration(found: Any) -> TypeGuard[float]:
    """Return whether an object is a number of seconds.

    Examples:
        >>> is_duration(0.5), is_duration(2), is_duration(-1.0), is_duration(1e300)
        (True, True, False, False)
        >>> is_duration(float("nan")), is_duration(True)
        (False, False)
    """
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return is_number and 0 <= found <= MOST


def _is_signed(found: Any) -> bool:
    return is_amount(found) or (type(found) is int and -MOST <= found < 0)


def _is_flag(found: Any) -> bool:
    return isinstance(found, bool)


_SOUND = {
    int: is_amount,
    float: is_duration,
    str: is_printable,
    bool: _is_flag,
    Signed: _is_signed,
}


@dataclass(frozen=True, slots=True)
class DataFile:
    """Dataclasses in a JSON file from any author.

    Fields are checked by their types: text can be printed, whole numbers are amounts,
    the others durations. Nothing in a file is executed.

    Attributes:
        format: The name of the format in the file.
        version: The version of the format.
        noun: The name of such a file in errors.
        error: The class of errors.
        advice: The advice for a wrong file.
    """

    format: str
    version: int
    noun: str
    error: type[RecoupError]
    advice: str

    def write(self, value: Any, *, by_columns: bool = False, **layout: Any) -> str:
        """Return a dataclass as JSON text.

        Args:
            value: The dataclass.
            by_columns: Write rows of one class as one list per field: much shorter.
            **layout: As for `json.dumps`.
        """
        head = {"format": self.format, "version": self.version}
        return json.dumps({**head, **_written(value, by_columns)}, **layout)

    def read(self, text: str, kind: type[Data]) -> Data:
        """Return the dataclass that a JSON text describes.

        Raises:
            RecoupError: The text describes none; of the class `error`.
        """
        try:
            data = json.loads(text)
            if not isinstance(data, dict):
                raise self._wrong(
                    f"expected a JSON object, got a {type(data).__name__}"
                )
            fields = cast("dict[str, Any]", data)
            found = fields.pop("format", None), fields.pop("version", None)
            if found != (self.format, self.version) or type(found[1]) is not int:
                raise self._wrong(
                    f"expected {self.format!r} of version {self.version}, got "
                    f"{found[0]!r:.60} of version {found[1]!r:.60}"
                )
            return self._read(fields, kind, self.noun)
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, self.error):
                raise
            raise self._wrong(str(error)) from error

    def damaged(self, where: str, found: object) -> RecoupError:
        """Return the error for a part that no valid file has."""
        return self.error(
            f"this {self.noun} is damaged: {where} is {found!r:.60}, where text can "
            f"be printed and amounts are from 0 to {MOST}. {self.advice}"
        )

    def _misfit(
        self, where: str, missing: Collection[str], unknown: Collection[str]
    ) -> RecoupError:
        """Return the error for an object with other fields than its dataclass."""
        names = sorted(missing) or sorted(unknown)
        verb = "lacks" if missing else "has an unknown field,"
        return self.error(
            f"this {self.noun} is damaged: {where} {verb} {names[0]!r:.60}. "
            f"{self.advice}"
        )

    def _wrong(self, why: str) -> RecoupError:
        return self.error(f"this is not a {self.noun}: {why}. {self.advice}")

    def _read(self, data: Any, kind: Any, where: str) -> Any:
        """Return data converted to the type of its field."""
        if dataclasses.is_dataclass(kind):
            if not isinstance(data, dict):
                raise self.damaged(where, data)
            given = cast("dict[str, Any]", data)
            hints, needed = _fields(kind)
            if not needed <= set(given) <= set(hints):
                raise self._misfit(where, needed - set(given), set(given) - set(hints))
            read = {
                key: self._read(item, hints[key], key) for key, item in given.items()
            }
            return cast("Any", kind)(**read)
        if get_origin(kind) is UnionType:  # a dataclass or None
            inner, _ = get_args(kind)
            return None if data is None else self._read(data, inner, where)
        if get_origin(kind) is tuple:
            return self._read_items(data, get_args(kind), where)
        if isinstance(kind, type) and issubclass(kind, Enum):
            if data not in [each.value for each in kind]:
                raise self.damaged(where, data)
        elif not _SOUND[kind](data):
            raise self.damaged(where, data)
        return kind(data)

    def _read_items(
        self, data: Any, kinds: tuple[Any, ...], where: str
    ) -> tuple[Any, ...]:
        if isinstance(data, dict) and dataclasses.is_dataclass(kinds[0]):
            columns = cast("dict[str, Any]", data)
            lengths = {
                len(cast("list[Any]", each)) if isinstance(each, list) else -1
                for each in columns.values()
            }
            if len(lengths) > 1 or -1 in lengths:
                raise self.damaged(f"the columns of {where}", columns)
            rows = zip(*columns.values(), strict=True)
            data = [dict(zip(columns, row, strict=True)) for row in rows]
        if not isinstance(data, list):
            raise self.damaged(where, cast("object", data))
        items = cast("list[Any]", data)
        if kinds[-1] is Ellipsis:
            return tuple(self._read(item, kinds[0], where) for item in items)
        if len(items) != len(kinds):
            raise self.damaged(where, items)
        pairs = zip(items, kinds, strict=True)
        return tuple(self._read(item, kind, where) for item, kind in pairs)


def _written(value: Any, by_columns: bool) -> Any:  # noqa: FBT001 (passed on)
    """Return a value as JSON data."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: _written(getattr(value, name), by_columns) for name in names}
    if isinstance(value, Enum):
        return value.value
    if not isinstance(value, tuple):
        return value
    items = cast("tuple[Any, ...]", value)
    rows = [_written(item, by_columns) for item in items]
    if by_columns and items and dataclasses.is_dataclass(items[0]):
        return {name: [row[name] for row in rows] for name in rows[0]}
    return rows


@cache
def _fields(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of a dataclass's fields, and the fields without a default."""
    missing = (f for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING)
    return get_type_hints(kind), frozenset(field.name for field in missing)


def plan_file(file_format: str, version: int) -> DataFile:
    """Return the file format of one kind of plan."""
    advice = "Make a new one with recoup.fit(...).plan.to_json()."
    return DataFile(file_format, version, "plan of recoup", PlanError, advice)

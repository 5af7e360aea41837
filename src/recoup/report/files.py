"""Findings in a file: JSON out, and in again on any machine."""

import dataclasses
import json
from functools import cache
from typing import Any, cast, get_args, get_origin, get_type_hints

from recoup.core.readings import MOST, is_amount, is_duration, is_printable
from recoup.errors import UsageError
from recoup.report.findings import CATEGORIES, Findings, Signed

FORMAT = "recoup findings"
FORMAT_VERSION = 2


def _is_signed(found: Any) -> bool:
    return is_amount(found) or (type(found) is int and -MOST <= found < 0)


_SOUND = {int: is_amount, float: is_duration, str: is_printable, Signed: _is_signed}
_ADVICE = "Make it anew with `recoup fit ... --findings FILE`."


def to_json(findings: Findings) -> str:
    """Return findings as JSON text; rows of one kind are written as columns."""
    head = {"format": FORMAT, "version": FORMAT_VERSION}
    return json.dumps({**head, **_written(findings)}, separators=(",", ":"))


def from_json(text: str) -> Findings:
    """Return the findings that a JSON text describes; nothing in it is executed.

    Raises:
        UsageError: The text is not what `to_json` writes, or of another version.

    Examples:
        >>> from_json("[]")
        Traceback (most recent call last):
        recoup.errors.UsageError: this is no file of findings: it is a list. ...
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"this is no file of findings: {error}. {_ADVICE}") from error
    if not isinstance(data, dict):
        kind = type(data).__name__
        raise UsageError(f"this is no file of findings: it is a {kind}. {_ADVICE}")
    fields = cast("dict[str, Any]", data)
    head = fields.pop("format", None), fields.pop("version", None)
    if head != (FORMAT, FORMAT_VERSION):
        raise UsageError(
            f"this is no file of findings of version {FORMAT_VERSION}: it says "
            f"{head[0]!r:.60} {head[1]!r:.60}. {_ADVICE}"
        )
    found = cast("Findings", _read(fields, Findings, "findings"))
    if not 0 <= found.chosen < len(found.plans):
        raise _damaged("chosen", found.chosen)
    _check_numbers(found)
    return found


def _check_numbers(found: Findings) -> None:
    """Raise unless all that is named by its number is there."""
    step = found.step
    count, parts, names = len(step.moments), len(step.parts), len(step.operators)
    for moment in step.moments:
        if moment.operator >= names or moment.part >= max(parts, 1):
            raise _damaged("a moment", moment)
    for name, first in step.phases:
        if first > count:
            raise _damaged(name, first)
    for view in found.plans:
        if len(view.costs) != parts:
            raise _damaged("costs", len(view.costs))
        if view.peak_moment >= max(count, 1):
            raise _damaged("peak_moment", view.peak_moment)
        for each in view.allocations:
            in_order = each.first <= each.last < count and each.maker < count
            if not in_order or each.category >= len(CATEGORIES) or each.part >= parts:
                raise _damaged("an allocation", each)
        for rerun in view.reruns:
            if rerun.moment >= count or rerun.part >= parts:
                raise _damaged("a rerun", rerun)


def _written(value: Any) -> Any:
    """Return a value as JSON has it."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: _written(getattr(value, field.name)) for field in fields}
    if isinstance(value, tuple):
        items = cast("tuple[Any, ...]", value)
        if items and dataclasses.is_dataclass(items[0]):
            fields = dataclasses.fields(items[0])
            return {
                field.name: [_written(getattr(item, field.name)) for item in items]
                for field in fields
            }
        return [_written(item) for item in items]
    return value


def _read(data: Any, kind: Any, where: str) -> Any:
    """Return data as the type that a field says it has."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(data, dict):
            raise _damaged(where, data)
        given = cast("dict[str, Any]", data)
        hints, needed = _fields(kind)
        if not needed <= set(given) <= set(hints):
            raise _damaged(where, given)
        read = {key: _read(item, hints[key], key) for key, item in given.items()}
        return cast("Any", kind)(**read)
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        if isinstance(data, dict) and dataclasses.is_dataclass(inner[0]):
            columns = cast("dict[str, list[Any]]", data)
            if len({_length(c, where) for c in columns.values()}) > 1:
                raise _damaged(f"the columns of {where}", columns)
            rows = zip(*columns.values(), strict=True)
            data = [dict(zip(columns, row, strict=True)) for row in rows]
        if not isinstance(data, list):
            raise _damaged(where, cast("object", data))
        items = cast("list[Any]", data)
        if inner[-1] is Ellipsis:
            return tuple(_read(item, inner[0], where) for item in items)
        if len(items) != len(inner):
            raise _damaged(where, items)
        return tuple(_read(a, b, where) for a, b in zip(items, inner, strict=True))
    if not _SOUND[kind](data):
        raise _damaged(where, data)
    return kind(data)


@cache
def _fields(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of a dataclass's fields, and those without a default."""
    missing = (f for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING)
    return get_type_hints(kind), frozenset(field.name for field in missing)


def _length(column: object, where: str) -> int:
    if not isinstance(column, list):
        raise _damaged(where, column)
    return len(cast("list[Any]", column))


def _damaged(where: str, found: object) -> UsageError:
    return UsageError(
        f"this file of findings is damaged: {where} is {found!r:.60}, where text can "
        f"be printed and amounts are from 0 to {MOST}. {_ADVICE}"
    )

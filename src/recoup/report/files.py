"""Findings in a file: JSON out, and in again on any machine."""

import dataclasses
import json
from typing import Any, cast, get_args, get_origin, get_type_hints

from recoup.core.readings import MOST, is_amount, is_duration, is_printable
from recoup.errors import UsageError
from recoup.report.findings import CATEGORIES, Findings, Timeline

FORMAT = "recoup findings"
FORMAT_VERSION = 1
_SOUND = {int: is_amount, float: is_duration, str: is_printable}
_ADVICE = "Make it anew with `recoup fit ... --findings FILE`."


def to_json(findings: Findings) -> str:
    """Return findings as JSON text."""
    head = {"format": FORMAT, "version": FORMAT_VERSION}
    return json.dumps({**head, **dataclasses.asdict(findings)})


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
    for view in found.plans:
        _check_bands(view.timeline)
    return found


def _check_bands(timeline: Timeline) -> None:
    """Raise unless the bands of a timeline have all its columns, and a colour."""
    columns = len(timeline.moments)
    for layer in timeline.layers:
        if len(layer.bytes_at) != columns:
            raise _damaged(f"a band of {columns} columns", layer.bytes_at)
        if layer.category not in CATEGORIES:
            raise _damaged("category", layer.category)


def _read(data: Any, kind: Any, where: str) -> Any:
    """Return data as the type that a field says it has."""
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        if not isinstance(data, dict):
            raise _damaged(where, data)
        given = cast("dict[str, Any]", data)
        needed = {
            field.name
            for field in dataclasses.fields(kind)
            if field.default is dataclasses.MISSING
        }
        if not needed <= set(given) <= set(hints):
            raise _damaged(where, given)
        read = {key: _read(item, hints[key], key) for key, item in given.items()}
        return cast("Any", kind)(**read)
    if get_origin(kind) is tuple:
        if not isinstance(data, list):
            raise _damaged(where, data)
        items = cast("list[Any]", data)
        inner = get_args(kind)
        if inner[-1] is Ellipsis:
            return tuple(_read(item, inner[0], where) for item in items)
        if len(items) != len(inner):
            raise _damaged(where, items)
        return tuple(_read(a, b, where) for a, b in zip(items, inner, strict=True))
    if not _SOUND[kind](data):
        raise _damaged(where, data)
    return kind(data)


def _damaged(where: str, found: object) -> UsageError:
    return UsageError(
        f"this file of findings is damaged: {where} is {found!r:.60}, where text can "
        f"be printed and amounts are from 0 to {MOST}. {_ADVICE}"
    )

"""Findings in a file: JSON out, and in again on any machine."""

from recoup.core.readings import DataFile
from recoup.errors import UsageError
from recoup.report.findings import CATEGORIES, Findings

FINDINGS = DataFile(
    "recoup findings",
    2,
    "file of findings",
    UsageError,
    "Make it anew with `recoup fit ... --findings FILE`.",
)


def to_json(findings: Findings) -> str:
    """Return findings as JSON text; rows of one kind are written as columns."""
    return FINDINGS.write(findings, by_columns=True, separators=(",", ":"))


def from_json(text: str) -> Findings:
    """Return the findings that a JSON text describes; nothing in it is executed.

    Raises:
        UsageError: The text is not from `to_json`, or has another version.

    Examples:
        >>> from_json("[]")
        Traceback (most recent call last):
        recoup.errors.UsageError: this is not a file of findings: expected ...
    """
    found = FINDINGS.read(text, Findings)
    if not 0 <= found.chosen < len(found.plans):
        raise FINDINGS.damaged("chosen", found.chosen)
    _check_numbers(found)
    return found


def _check_numbers(found: Findings) -> None:
    """Raise unless all numbers refer to existing items."""
    step = found.step
    count, parts, names = len(step.moments), len(step.parts), len(step.operators)
    for moment in step.moments:
        if moment.operator >= names or moment.part >= max(parts, 1):
            raise FINDINGS.damaged("a moment", moment)
    for name, first in step.phases:
        if first > count:
            raise FINDINGS.damaged(name, first)
    for view in found.plans:
        if len(view.costs) != parts:
            raise FINDINGS.damaged("costs", len(view.costs))
        if view.peak_moment >= max(count, 1):
            raise FINDINGS.damaged("peak_moment", view.peak_moment)
        for each in view.allocations:
            in_order = each.first <= each.last < count and each.maker < count
            if not in_order or each.category >= len(CATEGORIES) or each.part >= parts:
                raise FINDINGS.damaged("an allocation", each)
        for rerun in view.reruns:
            if rerun.moment >= count or rerun.part >= parts:
                raise FINDINGS.damaged("a rerun", rerun)

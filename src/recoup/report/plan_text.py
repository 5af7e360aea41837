"""A stored plan in words."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from recoup.core.plan import Plan, Span
from recoup.core.units import print_bytes, print_seconds
from recoup.report.texts import table


def plan_text(plan: Plan) -> str:
    """Return what a plan does, region by region.

    Examples:
        >>> print(plan_text(Plan()))
        A plan without regions: everything is kept, as plain autograd does.
    """
    if not plan.spans:
        return "A plan without regions: everything is kept, as plain autograd does."
    budget = f"for a budget of {print_bytes(plan.budget_bytes)}"
    head = (
        f"A plan {budget if plan.budget_bytes else 'without a budget'}: predicted peak "
        f"{print_bytes(plan.peak_bytes)}, predicted step {print_seconds(plan.seconds)}."
    )
    rows = [
        [
            "  " * depth + span.start.label,
            span.stop.label,
            _held_words(span),
        ]
        for depth, span in _all(plan.spans)
    ]
    return "\n".join(
        [
            head,
            f"Made for a step with the signature {plan.signature or 'none'}.",
            "",
            table(["region from", "to", "held; the rest is computed again"], rows),
            "",
            "What is in no region is kept, as plain autograd keeps it.",
        ]
    )


def plan_numbers(plan: Plan) -> dict[str, Any]:
    """Return the main numbers of a plan.

    Examples:
        >>> plan_numbers(Plan())["regions"]
        0
    """
    return {
        "signature": plan.signature,
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "seconds": plan.seconds,
        "regions": sum(1 for _ in _all(plan.spans)),
        "held": plan.count(),
        "held_bytes": sum(
            held.bytes for _, span in _all(plan.spans) for held in span.held
        ),
    }


def _all(spans: tuple[Span, ...], depth: int = 0) -> Iterator[tuple[int, Span]]:
    for span in spans:
        yield depth, span
        yield from _all(span.inner, depth + 1)


def _held_words(span: Span) -> str:
    if not span.held:
        return "nothing"
    counts = Counter((held.operator, held.action.value) for held in span.held)
    total = print_bytes(sum(held.bytes for held in span.held))
    said = ", ".join(
        f"{action} {count} of {operator}"
        for (operator, action), count in counts.most_common(3)
    )
    more = f", and {len(counts) - 3} more kinds" if len(counts) > 3 else ""
    return f"{total}: {said}{more}"

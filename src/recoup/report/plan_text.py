"""A stored plan in words."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from recoup.core.compiled_plan import COMPILED_PLANS, CompiledPlan
from recoup.core.display import WIDTH
from recoup.core.plan import Plan, Span
from recoup.core.units import print_bytes, print_seconds


def plan_text(plan: Plan | CompiledPlan) -> str:
    """Return a plan in words, region by region; equal neighbours once.

    Examples:
        >>> print(plan_text(Plan()))
        This plan recomputes nothing: all values are kept, as by plain autograd.
        >>> from recoup.core.plan import Place
        >>> spans = [
        ...     Span(Place(f"h.{n}", 0, True), Place(f"h.{n}", 0, False))
        ...     for n in range(3)
        ... ]
        >>> print(plan_text(Plan(tuple(spans))).splitlines()[-1])
        Values outside these regions are kept, as by plain autograd.
        >>> print(plan_text(Plan(tuple(spans))).splitlines()[-3])
        - h.0, and 2 more up to h.2: keeps nothing, recomputes everything.
        >>> called = Span(Place("h.3", 0, True), Place("h.3", 0, False), by_call=True)
        >>> print(plan_text(Plan((called,))).splitlines()[-3])
        - h.3: is called again in backward.
    """
    if isinstance(plan, CompiledPlan):
        return _compiled_text(plan)
    if not plan.regions:
        return (
            "This plan recomputes nothing: all values are kept, as by plain autograd."
        )
    kept = sum(held.bytes for _, span in _all(plan) for held in span.held)
    regions = (
        f"Forward has {plan.regions} regions. They hold {print_bytes(kept)} of the "
        "values made in them; backward recomputes the rest, region by region."
    )
    made = f"Made for the step with the signature {plan.signature or 'unknown'}."
    lines = [_head(plan), regions, made, ""]
    for number, part in enumerate(plan.parts, 1):
        if len(plan.parts) > 1:
            lines.append(f"Pass {number} (forward and backward) of {len(plan.parts)}:")
        lines += _spans_text(part.spans, 0)
    lines += ["", "Values outside these regions are kept, as by plain autograd."]
    return "\n".join(
        textwrap.fill(line, WIDTH) if line[:1] != " " else line for line in lines
    )


def read_plan(text: str) -> Plan | CompiledPlan:
    """Return the plan that a JSON text describes, of either kind.

    Raises:
        PlanError: The text is not a plan, is damaged, or has another version.

    Examples:
        >>> read_plan(Plan().to_json()) == Plan()
        True
    """
    if f'"{COMPILED_PLANS.format}"' in text[:200]:
        return CompiledPlan.from_json(text)
    return Plan.from_json(text)


def plan_numbers(plan: Plan | CompiledPlan) -> dict[str, Any]:
    """Return the main numbers of a plan.

    Examples:
        >>> plan_numbers(Plan())["regions"]
        0
    """
    costs = {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "seconds": plan.seconds,
    }
    if isinstance(plan, CompiledPlan):
        held_bytes = sum(block.held_bytes for block in plan.blocks)
        blocks = [block.module for block in plan.blocks]
        return {
            **costs,
            "executor": plan.executor,
            "blocks": blocks,
            "held_bytes": held_bytes,
        }
    spans = [span for _, span in _all(plan)]
    return {
        **costs,
        "signature": plan.signature,
        "regions": len(spans),
        "held": plan.count(),
        "repeated_calls": plan.repeated_calls,
        "held_bytes": sum(held.bytes for span in spans for held in span.held),
    }


def _head(plan: Plan | CompiledPlan) -> str:
    budget = f"Plan for a budget of {print_bytes(plan.budget_bytes)}"
    return (
        f"{budget if plan.budget_bytes else 'Plan without a budget'}: predicted peak "
        f"{print_bytes(plan.peak_bytes)}, predicted step {print_seconds(plan.seconds)}."
    )


def _compiled_text(plan: CompiledPlan) -> str:
    lines = [_head(plan), f"Compiled blocks ({plan.executor}) that save for backward:"]
    for (names, nbytes), group in groupby(
        plan.blocks, key=lambda block: (block.saves, block.held_bytes)
    ):
        blocks = list(group)
        more = f", and {len(blocks) - 1} more up to {blocks[-1].module}"
        saved = f"{len(names)} results" if names else "only their inputs"
        lines.append(
            f"- {blocks[0].module}{more if len(blocks) > 1 else ''}: {saved}, "
            f"{print_bytes(nbytes)} each."
        )
    lines.append("The other blocks run as written.")
    return "\n".join(textwrap.fill(line, WIDTH) for line in lines)


def _all(plan: Plan) -> Iterator[tuple[int, Span]]:
    def inside(spans: Sequence[Span], depth: int) -> Iterator[tuple[int, Span]]:
        for span in spans:
            yield depth, span
            yield from inside(span.inner, depth + 1)

    for part in plan.parts:
        yield from inside(part.spans, 0)


def _spans_text(spans: Sequence[Span], depth: int) -> list[str]:
    indent = "  " * depth
    lines: list[str] = []
    for _, group in groupby(
        spans, key=lambda span: (span.held, len(span.inner), span.by_call)
    ):
        equal = list(group)
        more = f", and {len(equal) - 1} more up to {equal[-1].stop.call_label}"
        line = (
            f"- {_extent(equal[0])}{more if len(equal) > 1 else ''}: "
            f"{_held_words(equal[0], each=len(equal) > 1)}."
        )
        lines.append(
            textwrap.fill(
                line, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  "
            )
        )
        lines += _spans_text(equal[0].inner, depth + 1)
    return lines


def _extent(span: Span) -> str:
    if span.start.module == span.stop.module and not span.stop.entering:
        return span.start.call_label
    start = "" if span.start.entering else "the end of "
    stop = "the beginning" if span.stop.entering else "the end"
    first, last = span.start.call_label, span.stop.call_label
    return f"from {start}{first} to {stop} of {last}"


def _held_words(span: Span, *, each: bool) -> str:
    if span.by_call:
        return "is called again in backward"
    if not span.held:
        return "keeps nothing, recomputes everything"
    counts = Counter((held.operator, held.action.value) for held in span.held)
    total = print_bytes(sum(held.bytes for held in span.held))
    held_words = ", ".join(
        f"{action}s {count} of {name.removeprefix('aten.').removesuffix('.default')}"
        for (name, action), count in counts.most_common(3)
    )
    rest = f", and {len(counts) - 3} more kinds" if len(counts) > 3 else ""
    return f"holds {total}{' each' * each} ({held_words}{rest}), recomputes the rest"

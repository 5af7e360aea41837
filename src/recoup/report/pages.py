"""Pages: one self-contained HTML file for a run, and a piece of it for a notebook."""

from functools import cache
from html import escape
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined, select_autoescape
from markupsafe import Markup

from recoup.core.units import print_bytes, print_seconds
from recoup.report.charts import frontier_chart, shades, timeline_chart
from recoup.report.findings import Baseline, Findings, PlanView
from recoup.report.texts import estimate_words, floor_words

_TEMPLATES = resources.files("recoup.report") / "templates"


def page(findings: Findings) -> str:
    """Return the findings as one HTML page that needs nothing else.

    It loads nothing from the network, follows the reader's light or dark setting, fits
    a phone, can be used with the keyboard alone, and prints. Without JavaScript all
    plans are shown one after the other.
    """
    return _template("page.html").render(
        findings=findings,
        lead=lead(findings),
        style=Markup(_file("page.css")),
        script=Markup(_file("page.js")),
        body=Markup(_body(findings)),
    )


def fragment(findings: Findings) -> str:
    """Return the plan in force as a piece of HTML, for a notebook."""
    view = findings.plan
    chart = timeline_chart(view.timeline, budget_bytes=findings.budget_bytes)
    return (
        f"<div><p><strong>{escape(findings.title)}</strong>: "
        f"{escape(lead(findings))}</p>{chart}</div>"
    )


def lead(findings: Findings) -> str:
    """Return the one sentence that a reader must not miss."""
    view = findings.plan
    peak_bytes = findings.measured_peak_bytes or view.peak_bytes
    how = "measured" if findings.measured_peak_bytes else "predicted"
    said = (
        f"{print_bytes(peak_bytes)} at the peak ({how}) instead of "
        f"{print_bytes(findings.plain_peak_bytes)}, a step "
        f"{_slower_words(view.seconds, findings.plain_seconds)} by prediction"
    )
    if findings.estimated_for:
        said += f" for {findings.estimated_for}, without running it"
    if findings.budget_bytes:
        said += f"; the budget is {print_bytes(findings.budget_bytes)}"
    return said + "."


def _body(findings: Findings) -> str:
    most_bytes = max(view.peak_bytes for view in findings.plans)
    return _template("body.html").render(
        numbers=_numbers(findings),
        note=(
            "The smallest budget that can be met is "
            f"{floor_words(findings)}. "
            f"{estimate_words(findings.estimated_for)}"
        ).strip(),
        frontier=Markup(frontier_chart(findings)),
        plans=[_plan(findings, view, most_bytes) for view in findings.plans],
        chosen=findings.chosen,
        rules=[
            _row(findings, f"recoup, {findings.plan.name}", findings.plan),
            *(_row(findings, rule.name, rule) for rule in findings.baselines),
        ],
        environment=findings.environment,
    )


def _numbers(findings: Findings) -> list[dict[str, str]]:
    view = findings.plan
    plain = Baseline("", findings.plain_peak_bytes, findings.plain_seconds)
    rows = [
        _row(findings, "plain, predicted", plain),
        _row(findings, "plan, predicted", view),
    ]
    if findings.measured_peak_bytes:
        measured = Baseline("", findings.measured_peak_bytes, findings.measured_seconds)
        # The time of the plain step is a prediction: a ratio of the two means little.
        rows.append({**_row(findings, "plan, measured", measured), "slower": "-"})
    return rows


def _row(findings: Findings, name: str, costs: Baseline | PlanView) -> dict[str, str]:
    budget_bytes = findings.budget_bytes
    return {
        "name": name,
        "peak": print_bytes(costs.peak_bytes),
        "share": _share(costs.peak_bytes, findings.plain_peak_bytes),
        "step": print_seconds(costs.seconds),
        "slower": _slower(costs.seconds, findings.plain_seconds),
        "fits": "-"
        if not budget_bytes
        else ("yes" if costs.peak_bytes <= budget_bytes else "no"),
    }


def _plan(findings: Findings, view: PlanView, most_bytes: int) -> dict[str, Any]:
    timeline = view.timeline
    chart = timeline_chart(
        timeline, budget_bytes=findings.budget_bytes, most_bytes=most_bytes
    )
    words = (
        f"{print_bytes(view.peak_bytes)} at the peak, "
        f"{_share(view.peak_bytes, findings.plain_peak_bytes)} of plain; a step of "
        f"{print_seconds(view.seconds)}, "
        f"{_slower_words(view.seconds, findings.plain_seconds)}"
    )
    if view.host_bytes:
        words += f"; {print_bytes(view.host_bytes)} on the host"
    return {
        "name": view.name,
        "words": words,
        "timeline": Markup(chart),
        "legend": [
            {"name": layer.name, "fill": fill, "opacity": opacity}
            for layer, (fill, opacity) in zip(
                timeline.layers, shades(timeline.layers), strict=True
            )
        ],
        "place": timeline.peak_place[:1].upper() + timeline.peak_place[1:],
        "alive": [
            {
                "name": name,
                "bytes": print_bytes(nbytes),
                "share": _share(nbytes, timeline.peak_bytes),
            }
            for name, nbytes in timeline.alive
        ],
        "blocks": [
            {
                "name": row.name,
                "action": row.action,
                "operators": row.operators,
                "saved": print_bytes(row.saved_bytes),
                "kept": print_bytes(row.kept_bytes),
                "offloaded": print_bytes(row.offloaded_bytes),
                "recomputed": print_bytes(row.recomputed_bytes),
                "replay": print_seconds(row.replay_seconds),
            }
            for row in view.blocks
        ],
    }


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _slower(seconds: float, plain_seconds: float) -> str:
    return f"{seconds / plain_seconds - 1:+.1%}" if plain_seconds else "-"


def _slower_words(seconds: float, plain_seconds: float) -> str:
    if seconds <= plain_seconds:
        return "as fast as plain"
    return f"{seconds / plain_seconds - 1:.1%} slower" if plain_seconds else "slower"


def _file(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    return Environment(
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
    )


def _template(name: str) -> Any:
    return _environment().from_string(_file(name))

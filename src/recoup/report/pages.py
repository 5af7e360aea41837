"""Pages: one self-contained HTML file for a run, and a fragment for a notebook."""

import base64
import zlib
from dataclasses import replace
from functools import cache
from html import escape
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined, select_autoescape
from markupsafe import Markup

from recoup.core.units import print_bytes, print_seconds
from recoup.report import charts
from recoup.report.charts import memory_chart, opacities
from recoup.report.drawing import Picture
from recoup.report.findings import Findings, to_json
from recoup.report.modules import block_rows
from recoup.report.texts import (
    cost_words,
    estimate_words,
    fits_words,
    floor_words,
    main_costs,
    rule_rows,
    share_words,
    verdict,
)
from recoup.report.timeline import timeline

MOST_DATA_BYTES = 1_200_000
"""The maximum data of a page, unless one plan alone has more."""

_TEMPLATES = resources.files("recoup.report") / "templates"


def page(findings: Findings) -> str:
    """Return the findings as one self-contained HTML page.

    It loads nothing from the network, follows the reader's light or dark setting, fits
    a phone, works with the keyboard alone, and prints. Without JavaScript it shows the
    active plan.
    """
    found = timeline(findings.step, findings.plan)
    return _template("page.html").render(
        findings=findings,
        verdict=verdict(findings),
        state=fits_words(
            findings.measured_peak_bytes or findings.plan.peak_bytes,
            findings.budget_bytes,
        ),
        numbers=_numbers(findings),
        note=(
            f"The smallest budget that can be met is {floor_words(findings)}. "
            f"{estimate_words(findings.estimated_for)}"
        ).strip(),
        charts=charts,
        svg=_svg,
        legend=[
            (layer.name, layer.category, opacity)
            for layer, opacity in zip(
                found.layers, opacities(found.layers), strict=True
            )
        ],
        place=found.peak_place[:1].upper() + found.peak_place[1:],
        alive=[
            (name, print_bytes(nbytes), share_words(nbytes, found.peak_bytes))
            for name, nbytes in found.alive
        ],
        blocks=[
            (
                row.name,
                row.action,
                row.operators,
                print_seconds(row.seconds),
                print_bytes(row.saved_bytes),
                print_bytes(row.kept_bytes),
                print_bytes(row.offloaded_bytes),
                print_bytes(row.recomputed_bytes),
                print_seconds(row.replay_seconds),
            )
            for row in block_rows(findings.step, findings.plan, merge=True)
        ],
        rules=rule_rows(findings),
        style=Markup(_file("page.css")),
        script=Markup(_file("page.js")),
        data=_data(findings),
    )


def fragment(findings: Findings) -> str:
    """Return the active plan as an HTML fragment, for a notebook."""
    return (
        f"<div><p><strong>{escape(findings.title)}</strong>: "
        f"{escape(verdict(findings))}</p>{memory_chart(findings).svg()}</div>"
    )


def _data(findings: Findings) -> str:
    """Return all findings, compressed; for a huge step only the main plans in full."""
    packed = _packed(findings)
    if len(packed) <= MOST_DATA_BYTES:
        return packed
    main = (findings.chosen, len(findings.plans) - 1)
    plans = tuple(
        view if number in main else replace(view, allocations=(), reruns=(), plan="")
        for number, view in enumerate(findings.plans)
    )
    return _packed(replace(findings, plans=plans))


def _packed(findings: Findings) -> str:
    return base64.b64encode(zlib.compress(to_json(findings).encode(), 9)).decode()


def _numbers(findings: Findings) -> list[tuple[str, ...]]:
    rows = [(each.name, *cost_words(findings, each)) for each in main_costs(findings)]
    if findings.measured_peak_bytes:
        # The plain step's time is predicted: a ratio of the two means little.
        rows[-1] = (*rows[-1][:-1], "-")
    return rows


def _svg(picture: Picture) -> Markup:
    return Markup(picture.svg())


def _file(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


@cache
def _template(name: str) -> Any:
    environment = Environment(
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
    )
    return environment.from_string(_file(name))

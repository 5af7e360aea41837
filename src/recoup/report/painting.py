"""Charts as points of colour: what the SVG shows, drawn with matplotlib."""

import importlib
import io
from collections.abc import Sequence
from typing import Any

from recoup.core.units import print_bytes, print_seconds
from recoup.errors import UnsupportedError
from recoup.report.charts import joined, shades
from recoup.report.drawing import colour, plain_colour, ticks
from recoup.report.findings import Baseline, Findings, PlanView, Timeline

_SIZE_INCHES = (9.6, 3.4)
_DOTS_PER_INCH = 200


def paint_timeline(
    timeline: Timeline, *, budget_bytes: int = 0, most_bytes: int = 0
) -> Any:
    """Return the memory of a step as a figure of matplotlib.

    Args:
        timeline: The memory.
        budget_bytes: A line is drawn there; 0: none.
        most_bytes: The top of the scale, to compare figures; 0: what is needed.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    figure, axes = _paper()
    count = len(timeline.moments)
    edges = list(range(count + 1))
    lower = [0] * count
    for layer, (named, opacity) in zip(
        timeline.layers, shades(timeline.layers), strict=True
    ):
        upper = [a + b for a, b in zip(lower, layer.bytes_at, strict=True)]
        axes.stairs(
            upper,
            edges,
            baseline=lower,
            fill=True,
            color=_shade(named),
            alpha=opacity,
            label=layer.name,
        )
        lower = upper
    half = sum(moment < timeline.forward_moments for moment in timeline.moments)
    axes.axvline(half, color=plain_colour("quiet"), linestyle=":", linewidth=0.8)
    if budget_bytes:
        axes.axhline(budget_bytes, color=plain_colour("accent"), linestyle="--")
        axes.text(
            count,
            budget_bytes,
            f"budget {print_bytes(budget_bytes)} ",
            color=plain_colour("accent"),
            ha="right",
            va="bottom",
        )
    if timeline.peak_moment in timeline.moments:
        column = timeline.moments.index(timeline.peak_moment)
        axes.plot(column + 0.5, timeline.peak_bytes, "o", color=plain_colour("accent"))
    top_bytes = max(timeline.peak_bytes, budget_bytes, most_bytes, 1) * 1.08
    axes.set(xlim=(0, max(count, 1)), ylim=(0, top_bytes))
    _mark_bytes(axes.yaxis, 0, top_bytes)
    axes.set_xticks([half / 2, (half + count) / 2], ["forward", "backward"])
    axes.tick_params(axis="x", length=0)
    axes.set_title(
        f"peak {print_bytes(timeline.peak_bytes)}, {timeline.peak_place}",
        loc="left",
        fontsize="medium",
    )
    figure.legend(loc="outside right upper", fontsize="x-small", frameon=False)
    return figure


def paint_frontier(findings: Findings) -> Any:
    """Return time against memory of all plans and baselines as a figure of matplotlib.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    figure, axes = _paper()
    axes.plot(*_places(findings.plans), "o-", color=plain_colour("held"), label="plans")
    axes.plot(
        *_places([findings.plan]), "o", color=plain_colour("accent"), label="in force"
    )
    for rule in joined(findings.baselines):
        axes.plot(*_places([rule]), "s", mfc="none", color=plain_colour("quiet"))
        axes.annotate(
            rule.name,
            (rule.peak_bytes, rule.seconds),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            fontsize="x-small",
            color=plain_colour("quiet"),
        )
    if findings.budget_bytes:
        axes.axvline(
            findings.budget_bytes,
            color=plain_colour("accent"),
            linestyle="--",
            label="budget",
        )
    axes.margins(0.08, 0.15)
    _mark_bytes(axes.xaxis, *axes.get_xlim())
    low, high = axes.get_ylim()
    marks = [mark for mark in ticks(low, high) if mark >= 0]
    axes.set_yticks(marks, [print_seconds(mark) for mark in marks])
    axes.set_ylim(low, high)
    axes.set_title("time of a step", loc="left", fontsize="medium")
    axes.legend(fontsize="x-small", frameon=False)
    return figure


def png_of(figure: Any) -> bytes:
    """Return a figure of matplotlib as a PNG."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=_DOTS_PER_INCH)
    return stream.getvalue()


def check_painter() -> Any:
    """Return matplotlib's module of figures.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UnsupportedError(
            "a PNG is drawn with matplotlib, which is not installed. Install it "
            "(pip install recoup[png]), or save the figure as .svg."
        ) from error


def _paper() -> tuple[Any, Any]:
    figures = check_painter()
    # Not through pyplot, which keeps figures and chooses a window for them.
    figure = figures.Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(b=False)
    axes.grid(axis="y", color=plain_colour("line"), linewidth=0.6)
    axes.set_axisbelow(b=True)
    axes.tick_params(labelsize="small")
    return figure, axes


def _places(points: Sequence[PlanView | Baseline]) -> tuple[list[int], list[float]]:
    return [point.peak_bytes for point in points], [point.seconds for point in points]


def _mark_bytes(axis: Any, low: float, high: float) -> None:
    marks = [mark for mark in ticks(low, high, base=2) if mark >= 0]
    axis.set_ticks(marks, labels=[print_bytes(int(mark)) for mark in marks])


def _shade(named: str) -> str:
    """Return the colour itself of one that a page may redefine."""
    return next(
        plain_colour(name)
        for name in ("fixed", "held", "running", "replay")
        if colour(name) == named
    )

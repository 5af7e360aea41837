"""Charts: the memory of a step over time, and time against memory, as SVG."""

from collections.abc import Sequence
from html import escape

from recoup.core.units import print_bytes, print_seconds
from recoup.report.drawing import Scale, colour, element, picture, text, ticks
from recoup.report.findings import Baseline, Findings, Layer, PlanView, Timeline

_WIDTH, _HEIGHT = 960, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 16, 30, 36
_FLOOR = _HEIGHT - _BOTTOM
_EDGE = _WIDTH - _RIGHT


def timeline_chart(
    timeline: Timeline, *, budget_bytes: int = 0, most_bytes: int = 0
) -> str:
    """Return the memory of a step as stacked bands, with its peak marked, as SVG.

    Args:
        timeline: The memory.
        budget_bytes: A line is drawn there; 0: none.
        most_bytes: The top of the scale, to compare charts; 0: what is needed.

    Examples:
        >>> layer = Layer("parameters", "fixed", (1024, 2048))
        >>> line = Timeline((layer,), (0, 1), 2, 1, 2048, 1, "in backward", ())
        >>> timeline_chart(line).startswith("<svg")
        True
    """
    top_bytes = max(timeline.peak_bytes, budget_bytes, most_bytes, 1) * 1.05
    up = Scale(0, top_bytes, _FLOOR, _TOP)
    count = len(timeline.moments)
    along = Scale(0, max(count, 1), _LEFT, _EDGE)
    half = sum(moment < timeline.forward_moments for moment in timeline.moments)
    label = (
        f"Memory over one step: the peak is {print_bytes(timeline.peak_bytes)}, "
        f"{timeline.peak_place}"
    )
    return picture(
        [
            *_byte_lines(up, top_bytes),
            *_bands(timeline.layers, along, up),
            *_halves(along, half, count),
            *_budget_across(up, budget_bytes),
            *_peak(timeline, along, up),
        ],
        width=_WIDTH,
        height=_HEIGHT,
        label=label,
    )


def frontier_chart(findings: Findings) -> str:
    """Return time against memory of all plans and baselines, as SVG.

    Each plan is a link to `#plan-N`, with its number as `data-plan`.
    """
    points: list[PlanView | Baseline] = [*findings.plans, *findings.baselines]
    low = min(point.peak_bytes for point in points)
    high = max(*(point.peak_bytes for point in points), findings.budget_bytes, 1)
    margin = (high - low) * 0.06 or high * 0.5
    along = Scale(low - margin, high + margin, _LEFT, _EDGE)
    slow = max(point.seconds for point in points)
    fast = min(point.seconds for point in points)
    gap = (slow - fast) * 0.12 or slow * 0.5 or 1.0
    up = Scale(fast - gap, slow + gap, _FLOOR, _TOP)
    corners = " ".join(
        f"{along.at(view.peak_bytes)},{up.at(view.seconds)}" for view in findings.plans
    )
    return picture(
        [
            *_second_lines(up),
            *_byte_marks(along),
            *_budget_up(along, findings.budget_bytes),
            *(_baseline(rule, along, up) for rule in joined(findings.baselines)),
            element(
                "polyline",
                points=corners,
                fill="none",
                stroke=colour("held"),
                stroke_width=2,
            ),
            *(
                _point(number, view, along, up, chosen=number == findings.chosen)
                for number, view in enumerate(findings.plans)
            ),
            text("time of a step", _LEFT, 18, fill=colour("quiet")),
        ],
        width=_WIDTH,
        height=_HEIGHT,
        label=f"Time against memory of {len(findings.plans)} plans",
    )


def joined(rules: Sequence[Baseline]) -> list[Baseline]:
    """Return rules with those of the same costs as one, under all their names.

    Examples:
        >>> rules = [
        ...     Baseline("a", 1, 2.0),
        ...     Baseline("b", 3, 1.0),
        ...     Baseline("c", 1, 2.0),
        ... ]
        >>> [rule.name for rule in joined(rules)]
        ['a; c', 'b']
    """
    names: dict[tuple[int, float], list[str]] = {}
    for rule in rules:
        names.setdefault((rule.peak_bytes, rule.seconds), []).append(rule.name)
    return [Baseline("; ".join(named), *costs) for costs, named in names.items()]


def band_colour(category: str, position: float) -> tuple[str, float]:
    """Return the colour of a band and its opacity; neighbours differ.

    Args:
        category: The category of its layer.
        position: Where it is among those of its category, from 0 to 1.

    Examples:
        >>> band_colour("held", 0.0)
        ('var(--held, #3b6fb6)', 1.0)
    """
    return colour(category), round(1.0 - 0.6 * position, 2)


def shades(layers: Sequence[Layer]) -> list[tuple[str, float]]:
    """Return the colour and opacity of every band.

    Examples:
        >>> len(shades([Layer("a", "held", ()), Layer("b", "held", ())]))
        2
    """
    found: list[tuple[str, float]] = []
    for layer in layers:
        same = [other.name for other in layers if other.category == layer.category]
        position = same.index(layer.name) / max(len(same) - 1, 1)
        found.append(band_colour(layer.category, position))
    return found


def _bands(layers: Sequence[Layer], along: Scale, up: Scale) -> list[str]:
    count = len(layers[0].bytes_at) if layers else 0
    lower = [0] * count
    drawn: list[str] = []
    for layer, (fill, opacity) in zip(layers, shades(layers), strict=True):
        upper = [a + b for a, b in zip(lower, layer.bytes_at, strict=True)]
        outline = _steps(upper, along, up, back=False)
        outline += _steps(lower, along, up, back=True)
        words = f"{layer.name}: at most {print_bytes(max(layer.bytes_at, default=0))}"
        drawn.append(
            element(
                "path",
                element("title", escape(words)),
                d=f"M{outline[1:]}Z",
                fill=fill,
                fill_opacity=opacity,
            )
        )
        lower = upper
    return drawn


def _steps(heights: Sequence[int], along: Scale, up: Scale, *, back: bool) -> str:
    """Return the outline of columns, from the left or from the right."""
    corners: list[tuple[float, float]] = []
    for column, height in enumerate(heights):
        y = up.at(height)
        if corners and corners[-1][1] == y:
            corners[-1] = (along.at(column + 1), y)
        else:
            corners += [(along.at(column), y), (along.at(column + 1), y)]
    if back:
        corners.reverse()
    return "".join(f"L{x:g} {y:g}" for x, y in corners)


def _byte_lines(up: Scale, top_bytes: float) -> list[str]:
    drawn: list[str] = []
    for amount in ticks(0, top_bytes, base=2):
        y = up.at(amount)
        drawn += [
            _line(_LEFT, y, _EDGE, y, stroke=colour("line")),
            text(print_bytes(int(amount)), _LEFT - 8, y + 4, text_anchor="end"),
        ]
    return drawn


def _byte_marks(along: Scale) -> list[str]:
    drawn: list[str] = []
    for amount in ticks(along.low, along.high, base=2, count=6):
        if amount >= 0:
            x = along.at(amount)
            drawn += [
                _line(x, _FLOOR, x, _FLOOR + 5, stroke=colour("quiet")),
                text(print_bytes(int(amount)), x, _HEIGHT - 14, text_anchor="middle"),
            ]
    return drawn


def _second_lines(up: Scale) -> list[str]:
    drawn: list[str] = []
    for seconds in ticks(up.low, up.high):
        if seconds >= 0:
            y = up.at(seconds)
            drawn += [
                _line(_LEFT, y, _EDGE, y, stroke=colour("line")),
                text(print_seconds(seconds), _LEFT - 8, y + 4, text_anchor="end"),
            ]
    return drawn


def _halves(along: Scale, half: int, count: int) -> list[str]:
    x = along.at(half)
    drawn = [_line(x, _TOP, x, _FLOOR, stroke=colour("quiet"), stroke_dasharray="2 4")]
    for name, middle in (("forward", half / 2), ("backward", (half + count) / 2)):
        place = along.at(middle)
        drawn.append(text(name, place, _HEIGHT - 14, text_anchor="middle"))
    return drawn


def _budget_across(up: Scale, budget_bytes: int) -> list[str]:
    if not budget_bytes:
        return []
    y = up.at(budget_bytes)
    return [
        _line(_LEFT, y, _EDGE, y, stroke=colour("accent"), stroke_dasharray="6 4"),
        text(
            f"budget {print_bytes(budget_bytes)}",
            _EDGE - 4,
            y - 5,
            text_anchor="end",
            fill=colour("accent"),
        ),
    ]


def _budget_up(along: Scale, budget_bytes: int) -> list[str]:
    if not budget_bytes:
        return []
    x = along.at(budget_bytes)
    return [
        _line(x, _TOP, x, _FLOOR, stroke=colour("accent"), stroke_dasharray="6 4"),
        text("budget", x, _TOP - 8, text_anchor="middle", fill=colour("accent")),
    ]


def _peak(timeline: Timeline, along: Scale, up: Scale) -> list[str]:
    if timeline.peak_moment not in timeline.moments:
        return []
    column = timeline.moments.index(timeline.peak_moment)
    x, y = along.at(column + 0.5), up.at(timeline.peak_bytes)
    left = x > (_LEFT + _EDGE) / 2
    return [
        element("circle", cx=x, cy=y, r=4, fill=colour("accent")),
        text(
            f"peak {print_bytes(timeline.peak_bytes)}",
            x + (-8 if left else 8),
            y - 7,
            text_anchor="end" if left else "start",
            font_weight="bold",
        ),
    ]


def _point(
    number: int, view: PlanView, along: Scale, up: Scale, *, chosen: bool
) -> str:
    words = (
        f"{view.name}: {print_bytes(view.peak_bytes)}, {print_seconds(view.seconds)}"
    )
    dot = element(
        "circle",
        element("title", escape(words)),
        cx=along.at(view.peak_bytes),
        cy=up.at(view.seconds),
        r=7 if chosen else 5,
        fill=colour("accent") if chosen else colour("held"),
        stroke=colour("paper"),
        stroke_width=2,
    )
    return element("a", dot, href=f"#plan-{number}", data_plan=number)


def _baseline(rule: Baseline, along: Scale, up: Scale) -> str:
    x, y = along.at(rule.peak_bytes), up.at(rule.seconds)
    words = (
        f"{rule.name}: {print_bytes(rule.peak_bytes)}, {print_seconds(rule.seconds)}"
    )
    left = x > (_LEFT + _EDGE) / 2
    return element(
        "g",
        [
            element("title", escape(words)),
            element(
                "rect",
                x=round(x - 4, 1),
                y=round(y - 4, 1),
                width=8,
                height=8,
                fill=colour("paper"),
                stroke=colour("quiet"),
                stroke_width=1.5,
            ),
            text(
                rule.name,
                round(x + (4 if left else -4), 1),
                round(y - 9, 1),
                text_anchor="end" if left else "start",
                fill=colour("quiet"),
            ),
        ],
    )


def _line(x1: float, y1: float, x2: float, y2: float, **attributes: str) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)

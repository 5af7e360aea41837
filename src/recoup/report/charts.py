"""Charts: the memory of a step over time, and time versus memory."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from recoup.core.units import print_bytes, print_seconds
from recoup.report.drawing import Area, Line, Mark, Picture, Scale, Shape, Words, ticks
from recoup.report.findings import Baseline, Findings, PlanView
from recoup.report.timeline import Layer, Timeline, timeline

_WIDTH, _HEIGHT = 960, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 16, 30, 36
_FLOOR = _HEIGHT - _BOTTOM
_EDGE = _WIDTH - _RIGHT


def memory_chart(findings: Findings) -> Picture:
    """Return the memory of a step with the active plan."""
    return timeline_chart(
        timeline(findings.step, findings.plan), budget_bytes=findings.budget_bytes
    )


def timeline_chart(
    found: Timeline, *, budget_bytes: int = 0, most_bytes: int = 0
) -> Picture:
    """Return the memory of a step as stacked bands, with its peak marked.

    Examples:
        >>> layer = Layer("parameters", "fixed", (1024, 2048))
        >>> line = Timeline((layer,), (0, 1), (), 2048, 1, "in backward", ())
        >>> timeline_chart(line).svg().startswith("<svg")
        True
    """
    top_bytes = max(found.peak_bytes, budget_bytes, most_bytes, 1) * 1.05
    up = Scale(0, top_bytes, _FLOOR, _TOP)
    along = Scale(0, max(len(found.moments), 1), _LEFT, _EDGE)
    shapes: list[Shape] = [
        *_levels(up, lambda amount: print_bytes(int(amount)), base=2),
        *_bands(found.layers, along, up),
        *_phases(found, along),
    ]
    if budget_bytes:
        y, words = up.at(budget_bytes), f"budget {print_bytes(budget_bytes)}"
        shapes.append(_budget((_LEFT, y), (_EDGE, y)))
        shapes.append(Words(words, _EDGE - 4, y - 5, "end", "accent"))
    shapes += _peak(found, along, up)
    label = (
        f"Memory over one step: the peak is {print_bytes(found.peak_bytes)}, "
        f"{found.peak_place}"
    )
    return Picture(tuple(shapes), _WIDTH, _HEIGHT, label)


def frontier_chart(findings: Findings) -> Picture:
    """Return time versus memory of all plans and baselines.

    The line is the time of the fastest plan within each budget.
    """
    points: list[PlanView | Baseline] = [*findings.plans, *findings.baselines]
    peaks = [point.peak_bytes for point in points]
    low, high = min(peaks), max(*peaks, findings.budget_bytes, 1)
    margin = (high - low) * 0.06 or high * 0.5
    along = Scale(low - margin, high + margin, _LEFT, _EDGE)
    times = [point.seconds for point in points]
    gap = (max(times) - min(times)) * 0.12 or max(times) * 0.5 or 1.0
    up = Scale(min(times) - gap, max(times) + gap, _FLOOR, _TOP)
    places = [(along.at(b), up.at(s)) for b, s in frontier_steps(findings)]
    budget = along.at(findings.budget_bytes)
    shapes: list[Shape] = [
        *_levels(up, print_seconds),
        *_byte_marks(along),
        Line([*places, (_EDGE, places[-1][1])], "held", 2),
    ]
    if findings.budget_bytes:
        shapes.append(_budget((budget, _TOP), (budget, _FLOOR)))
        shapes.append(Words("budget", budget, _TOP - 8, "middle", "accent"))
    for rule in joined(findings.baselines):
        shapes += _baseline(rule, along, up)
    for number, view in enumerate(findings.plans):
        is_chosen = number == findings.chosen
        shapes.append(
            Mark(
                along.at(view.peak_bytes),
                up.at(view.seconds),
                7 if is_chosen else 5,
                "accent" if is_chosen else "held",
                _point_words(view),
            )
        )
    shapes.append(Words("time of a step", _LEFT, 18, colour="quiet"))
    label = f"Time versus memory of {len(findings.plans)} plans"
    return Picture(tuple(shapes), _WIDTH, _HEIGHT, label)


def frontier_steps(findings: Findings) -> list[tuple[int, float]]:
    """Return the corners of the line of the fastest time within each budget.

    No plan and no rule is below it.
    """
    corners: list[tuple[int, float]] = []
    for view in findings.plans:
        if not corners or view.seconds < corners[-1][1]:
            if corners:
                corners.append((view.peak_bytes, corners[-1][1]))
            corners.append((view.peak_bytes, view.seconds))
    return corners


def joined(rules: Sequence[Baseline]) -> list[Baseline]:
    """Return rules, those with the same costs as one under all their names.

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


def opacities(layers: Sequence[Layer]) -> list[float]:
    """Return the opacity of every band; neighbours of one category differ.

    Examples:
        >>> opacities([Layer("a", "held", ()), Layer("b", "held", ())])
        [1.0, 0.4]
    """
    found: list[float] = []
    for layer in layers:
        same = [other.name for other in layers if other.category == layer.category]
        position = same.index(layer.name) / max(len(same) - 1, 1)
        found.append(round(1.0 - 0.6 * position, 2))
    return found


def _bands(layers: Sequence[Layer], along: Scale, up: Scale) -> list[Area]:
    lower = [0] * (len(layers[0].bytes_at) if layers else 0)
    drawn: list[Area] = []
    for layer, opacity in zip(layers, opacities(layers), strict=True):
        upper = [a + b for a, b in zip(lower, layer.bytes_at, strict=True)]
        outline = _steps(upper, along, up) + _steps(lower, along, up)[::-1]
        most = print_bytes(max(layer.bytes_at, default=0))
        label = f"{layer.name}: at most {most}"
        drawn.append(Area(outline, layer.category, opacity, label))
        lower = upper
    return drawn


def _steps(
    heights: Sequence[int], along: Scale, up: Scale
) -> list[tuple[float, float]]:
    """Return the outline of columns."""
    corners: list[tuple[float, float]] = []
    for column, height in enumerate(heights):
        y = up.at(height)
        if corners and corners[-1][1] == y:
            corners[-1] = (along.at(column + 1), y)
        else:
            corners += [(along.at(column), y), (along.at(column + 1), y)]
    return corners


def _levels(up: Scale, words: Callable[[float], str], *, base: int = 10) -> list[Shape]:
    drawn: list[Shape] = []
    for amount in ticks(up.low, up.high, base=base):
        if amount >= 0:
            y = up.at(amount)
            drawn.append(Line([(_LEFT, y), (_EDGE, y)], "line"))
            drawn.append(Words(words(amount), _LEFT - 8, y + 4, "end"))
    return drawn


def _byte_marks(along: Scale) -> list[Shape]:
    drawn: list[Shape] = []
    for amount in ticks(along.low, along.high, base=2, count=6):
        if amount >= 0:
            x = along.at(amount)
            drawn.append(Line([(x, _FLOOR), (x, _FLOOR + 5)], "quiet"))
            drawn.append(Words(print_bytes(int(amount)), x, _HEIGHT - 14, "middle"))
    return drawn


def _phases(found: Timeline, along: Scale) -> list[Shape]:
    drawn: list[Shape] = []
    for (name, first), (_, end) in pairwise([*found.phases, ("", len(found.moments))]):
        if first:
            x = along.at(first)
            drawn.append(Line([(x, _TOP), (x, _FLOOR)], "quiet", dashes=(2, 4)))
        middle = along.at((first + end) / 2)
        drawn.append(Words(name, middle, _HEIGHT - 14, "middle"))
    return drawn


def _budget(start: tuple[float, float], end: tuple[float, float]) -> Line:
    return Line([start, end], "accent", dashes=(6, 4))


def _peak(found: Timeline, along: Scale, up: Scale) -> list[Shape]:
    if found.peak_moment not in found.moments:
        return []
    x = along.at(found.moments.index(found.peak_moment) + 0.5)
    y = up.at(found.peak_bytes)
    words = f"peak {print_bytes(found.peak_bytes)}"
    is_right = x > (_LEFT + _EDGE) / 2
    side = Words(words, x - 8, y - 7, "end", is_bold=True)
    if not is_right:
        side = Words(words, x + 8, y - 7, is_bold=True)
    return [Mark(x, y, 4, "accent", words), side]


def _point_words(point: PlanView | Baseline) -> str:
    costs = f"{print_bytes(point.peak_bytes)}, {print_seconds(point.seconds)}"
    return f"{point.name}: {costs}"


def _baseline(rule: Baseline, along: Scale, up: Scale) -> list[Shape]:
    x, y = along.at(rule.peak_bytes), up.at(rule.seconds)
    mark = Mark(x, y, 4, "quiet", _point_words(rule), is_square=True)
    if x > (_LEFT + _EDGE) / 2:
        return [mark, Words(rule.name, x + 4, y - 9, "end", "quiet")]
    return [mark, Words(rule.name, x - 4, y - 9, "start", "quiet")]

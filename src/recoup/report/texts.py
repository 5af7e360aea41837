"""Text: tables, bars and one-line summaries for a terminal or a log."""

from collections.abc import Sequence
from itertools import pairwise

from recoup.core.units import print_bytes, print_seconds
from recoup.report.findings import BlockRow, Entry, Findings, PlanView, Timeline

_BARS = " ▁▂▃▄▅▆▇█"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows in columns; all but the first column are aligned to the right.

    Examples:
        >>> print(table(["block", "saved"], [["h.0", "12 B"], ["h.10", "1 B"]]))
        block  saved
        -----  -----
        h.0     12 B
        h.10     1 B
    """
    columns = list(zip(headings, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    rule = ["-" * width for width in widths]
    lines: list[str] = []
    for row in (headings, rule, *rows):
        cells = [
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def timeline_text(timeline: Timeline, *, width: int = 72, height: int = 8) -> str:
    """Return the memory of a step as a picture of characters.

    Args:
        timeline: The memory.
        width: Columns.
        height: Lines.

    Examples:
        >>> from recoup.report.findings import Layer
        >>> layer = Layer("values", "held", (1, 2, 4, 2))
        >>> line = Timeline((layer,), (0, 1, 2, 3), 4, 2, 4, 2, "in backward", ())
        >>> print(timeline_text(line, width=4, height=2))
          █   4 B, in backward
        ▄███
        f ba
    """
    sums = [sum(c) for c in zip(*(x.bytes_at for x in timeline.layers), strict=True)]
    if not sums:
        return "nothing is in use"
    shown = min(width, len(sums))
    edges = [len(sums) * n // shown for n in range(shown + 1)]
    heights = [max(sums[a:b]) for a, b in pairwise(edges)]
    half = sum(
        timeline.moments[start] < timeline.forward_moments for start in edges[:-1]
    )
    lines: list[str] = []
    for line in range(height, 0, -1):
        cells = ""
        for amount in heights:
            eighths = round(8 * height * amount / max(timeline.peak_bytes, 1))
            cells += _BARS[max(0, min(8, eighths - 8 * (line - 1)))]
        lines.append(cells.rstrip())
    lines[0] = (
        f"{lines[0].ljust(shown)}  "
        f"{print_bytes(timeline.peak_bytes)}, {timeline.peak_place}"
    )
    words = "forward"[: max(half - 1, 0)].ljust(half) + "backward"[: shown - half]
    lines.append(words.rstrip())
    return "\n".join(lines)


def alive_text(timeline: Timeline, *, most: int = 8) -> str:
    """Return what the peak is made of, largest first.

    Examples:
        >>> alive = (("parameters", 2048), ("held by h.0", 1024))
        >>> print(alive_text(Timeline((), (), 2, 1, 3072, 0, "here", alive)))
        in use at the peak  bytes  share
        ------------------  -----  -----
        parameters          2 KiB    67%
        held by h.0         1 KiB    33%
    """
    return table(
        ["in use at the peak", "bytes", "share"],
        [
            [name, print_bytes(nbytes), _share(nbytes, timeline.peak_bytes)]
            for name, nbytes in timeline.alive[:most]
        ],
    )


def blocks_text(view: PlanView) -> str:
    """Return what a plan does in each block; alike neighbours share a line.

    Examples:
        >>> from recoup.report.findings import BlockRow
        >>> rows = tuple(BlockRow(f"h.{n}", 9, 64, 0, 0, 64, 0.5) for n in range(3))
        >>> line = Timeline((), (), 0, 0, 0, 0, "", ())
        >>> print(blocks_text(PlanView("plan", 0, 0.0, 0, line, rows)))
        block          action  saved  kept  to host  computed again  replay
        ----------  ---------  -----  ----  -------  --------------  ------
        h.0 to h.2  recompute  192 B   0 B      0 B           192 B   1.5 s
    """
    groups: list[list[BlockRow]] = []
    for row in view.blocks:
        if groups and _alike(groups[-1][0], row):
            groups[-1].append(row)
        else:
            groups.append([row])
    rows: list[list[str]] = []
    for group in groups:
        first, last = group[0].name, group[-1].name
        rows.append(
            [
                first if first == last else f"{first} to {last}",
                group[0].action,
                print_bytes(sum(row.saved_bytes for row in group)),
                print_bytes(sum(row.kept_bytes for row in group)),
                print_bytes(sum(row.offloaded_bytes for row in group)),
                print_bytes(sum(row.recomputed_bytes for row in group)),
                print_seconds(sum(row.replay_seconds for row in group)),
            ]
        )
    headings = ["block", "action", "saved", "kept", "to host", "computed again"]
    return table([*headings, "replay"], rows)


def frontier_text(findings: Findings) -> str:
    """Return all plans from the smallest peak to the largest; * is in force."""
    return table(
        ["plan", "peak", "of plain", "step", "slower"],
        [
            [
                ("* " if number == findings.chosen else "  ") + view.name,
                print_bytes(view.peak_bytes),
                _share(view.peak_bytes, findings.plain_peak_bytes),
                print_seconds(view.seconds),
                _slower(view.seconds, findings.plain_seconds),
            ]
            for number, view in enumerate(findings.plans)
        ],
    )


def comparison_text(findings: Findings) -> str:
    """Return the plan in force beside the rules that people use, by prediction."""
    ours = (f"recoup, {findings.plan.name}", findings.plan)
    rules = [(rule.name, rule) for rule in findings.baselines]
    return table(
        ["rule", "peak", "of plain", "step", "slower", "fits"],
        [
            [
                name,
                print_bytes(costs.peak_bytes),
                _share(costs.peak_bytes, findings.plain_peak_bytes),
                print_seconds(costs.seconds),
                _slower(costs.seconds, findings.plain_seconds),
                _fits(costs.peak_bytes, findings.budget_bytes),
            ]
            for name, costs in (ours, *rules)
        ],
    )


def contest_text(entries: Sequence[Entry]) -> str:
    """Return what contenders cost beside the first that ran.

    Examples:
        >>> plain = Entry("plain", 2048, 1.0, 0.0)
        >>> other = Entry("other", 1024, 1.5, 0.25)
        >>> print(contest_text([plain, other, Entry("large", failure="out of memory")]))
        contender   peak  of first   step  slower      gradients
        ---------  -----  --------  -----  ------  -------------
        plain      2 KiB      100%    1 s       -      same bits
        other      1 KiB       50%  1.5 s  +50.0%   2.5e-01 away
        large          -         -      -       -  out of memory
    """
    base = next((entry for entry in entries if not entry.failure), None)
    return table(
        ["contender", "peak", "of first", "step", "slower", "gradients"],
        [_contender(entry, base) for entry in entries],
    )


def estimate_words(estimated_for: str) -> str:
    """Return what to know of times that nobody measured; nothing if somebody did.

    Examples:
        >>> estimate_words("")
        ''
        >>> estimate_words("h100")[:47]
        'Times are estimates for h100: what it does at b'
    """
    if not estimated_for:
        return ""
    return (
        f"Times are estimates for {estimated_for}: what it does at best, so that real "
        "steps take longer. Bytes are exact for the processor."
    )


def floor_words(findings: Findings) -> str:
    """Return the smallest budget, rounded to read and exact to be asked for.

    Examples:
        >>> from recoup.core.graph import Graph
        >>> from recoup.report.composition import compose
        >>> floor_words(compose(Graph((), 0, (), (), (), (), ()), (), floor_bytes=1030))
        '1.01 KiB (1030 B)'
    """
    return f"{print_bytes(findings.floor_bytes)} ({findings.floor_bytes} B)"


def summary_text(findings: Findings) -> str:
    """Return what was found: predictions, measurement, peak and blocks."""
    view = findings.plan
    rows = [
        ["plain, predicted", findings.plain_peak_bytes, findings.plain_seconds],
        ["plan, predicted", view.peak_bytes, view.seconds],
    ]
    if findings.measured_peak_bytes:
        measured = findings.measured_peak_bytes, findings.measured_seconds
        rows.append(["plan, measured", *measured])
    lines = [
        findings.title,
        "",
        table(
            ["", "peak", "step"],
            [
                [f"{n}", print_bytes(int(b)), print_seconds(float(s))]
                for n, b, s in rows
            ],
        ),
        "",
        f"floor {floor_words(findings)}"
        + (
            f", budget {print_bytes(findings.budget_bytes)}"
            * bool(findings.budget_bytes)
        ),
        "",
        timeline_text(view.timeline),
        "",
        alive_text(view.timeline),
        "",
        blocks_text(view),
    ]
    return "\n".join(lines)


def _contender(entry: Entry, base: Entry | None) -> list[str]:
    if entry.peak_bytes is None or entry.seconds is None or base is None:
        return [entry.name, "-", "-", "-", "-", entry.failure]
    far = entry.difference or 0.0
    same = "same bits" if not far else f"{far:.1e} away"
    return [
        entry.name,
        print_bytes(entry.peak_bytes),
        _share(entry.peak_bytes, base.peak_bytes or 0),
        print_seconds(entry.seconds),
        "-" if entry is base else _slower(entry.seconds, base.seconds or 0.0),
        same,
    ]


def _alike(one: BlockRow, other: BlockRow) -> bool:
    return (one.action, one.saved_bytes) == (other.action, other.saved_bytes)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _slower(seconds: float, plain_seconds: float) -> str:
    return f"{seconds / plain_seconds - 1:+.1%}" if plain_seconds else "-"


def _fits(peak_bytes: int, budget_bytes: int) -> str:
    if not budget_bytes:
        return "-"
    return "yes" if peak_bytes <= budget_bytes else "no"

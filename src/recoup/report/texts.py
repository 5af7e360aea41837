"""Text: a verdict, tables and bars for a terminal of 80 columns, or a log."""

import textwrap
from collections.abc import Sequence
from itertools import pairwise

from recoup.core.display import WIDTH, table
from recoup.core.units import print_bytes, print_seconds
from recoup.report.findings import Baseline, Entry, Findings, PlanView, Step
from recoup.report.modules import block_rows
from recoup.report.timeline import Timeline, timeline

_BARS = " ▁▂▃▄▅▆▇█"


def verdict(findings: Findings) -> str:
    """Return the main result in one sentence.

    Examples:
        >>> from recoup.core.graph import Graph
        >>> from recoup.report.composition import compose
        >>> verdict(compose(Graph((), 0, (), (), (), (), ())))
        'The plain step takes 0 B; the smallest budget that can be met is 0 B.'
    """
    view, budget_bytes = findings.plan, findings.budget_bytes
    peak_bytes = findings.measured_peak_bytes or view.peak_bytes
    how = "measured" if findings.measured_peak_bytes else "predicted"
    plain = print_bytes(findings.plain_peak_bytes)
    device = f" on {findings.estimated_for}" if findings.estimated_for else ""
    if not budget_bytes and view.name == "plain":
        floor = print_bytes(findings.floor_bytes)
        return (
            f"The plain step takes {plain}; the smallest budget that can be met is "
            f"{floor}."
        )
    is_over = fits_words(peak_bytes, budget_bytes) == "no"
    if is_over and not findings.measured_peak_bytes:
        return (
            f"Does not fit: the smallest peak known is {print_bytes(peak_bytes)}, the "
            f"budget {print_bytes(budget_bytes)}; plain {plain}."
        )
    fits = "Does not fit" if is_over else "Fits"
    budget = f" of a budget of {print_bytes(budget_bytes)}" if budget_bytes else ""
    return (
        f"{fits}: peak {print_bytes(peak_bytes)} ({how}){budget}, plain {plain}; "
        f"a step is predicted {pace_words(view.seconds, findings.plain_seconds)}"
        f"{device}."
    )


def timeline_text(found: Timeline, *, width: int = 66, height: int = 8) -> str:
    """Return the memory of a step as a character plot.

    Examples:
        >>> from recoup.report.timeline import Layer
        >>> layer = Layer("values", "held", (1, 2, 4, 2))
        >>> phases = (("forward", 0), ("backward", 2))
        >>> line = Timeline((layer,), (0, 1, 2, 3), phases, 4, 2, "in backward", ())
        >>> print(timeline_text(line, width=4, height=2))
        4 B |  █
            |▄███
        0 B +----
             f ba
        peak: 4 B, in backward
    """
    sums = [sum(c) for c in zip(*(x.bytes_at for x in found.layers), strict=True)]
    if not sums:
        return "nothing is in use"
    shown = min(width, len(sums))
    edges = [len(sums) * n // shown for n in range(shown + 1)]
    heights = [max(sums[a:b]) for a, b in pairwise(edges)]
    peak = print_bytes(found.peak_bytes)
    lines: list[str] = []
    for line in range(height, 0, -1):
        cells = ""
        for amount in heights:
            eighths = round(8 * height * amount / max(found.peak_bytes, 1))
            cells += _BARS[max(0, min(8, eighths - 8 * (line - 1)))]
        axis = peak if line == height else ""
        lines.append(f"{axis.rjust(len(peak))} |{cells}".rstrip())
    lines.append(f"{'0 B'.rjust(len(peak))} +{'-' * shown}")
    starts = [sum(edge < first for edge in edges[:-1]) for _, first in found.phases]
    words = ""
    for (name, _), start, stop in zip(
        found.phases, starts, [*starts[1:], shown + 1], strict=True
    ):
        words = words.ljust(start) + name[: max(stop - start - 1, 0)]
    lines.append(f"{' ' * len(peak)}  {words}".rstrip())
    lines.append(textwrap.fill(f"peak: {peak}, {found.peak_place}", WIDTH))
    return "\n".join(lines)


def alive_text(found: Timeline, *, most: int = 8) -> str:
    """Return the parts of the peak, largest first; the rows add up to it.

    Examples:
        >>> alive = (("parameters", 2048), ("a", 600), ("b", 424))
        >>> line = Timeline((), (), (), 3072, 0, "here", alive)
        >>> print(alive_text(line, most=1))
        in use at the peak  bytes  share
        ------------------  -----  -----
        parameters          2 KiB    67%
        2 others            1 KiB    33%
    """
    rows = list(found.alive[:most])
    rest = found.alive[most:]
    if rest:
        rows.append((f"{len(rest)} others", sum(nbytes for _, nbytes in rest)))
    return table(
        ["in use at the peak", "bytes", "share"],
        [
            [name, print_bytes(nbytes), share_words(nbytes, found.peak_bytes)]
            for name, nbytes in rows
        ],
    )


def blocks_text(step: Step, view: PlanView) -> str:
    """Return the effect of a plan on each block; equal neighbours share a line.

    Examples:
        >>> from recoup.report.findings import Part, PartCost
        >>> parts = tuple(Part(f"h.{n}", f"h.{n}", 9, 0.5, 64) for n in range(3))
        >>> costs = (PartCost(0, 0, 0.5),) * 3
        >>> view = PlanView("plan", 0, 0.0, 0, 0, "", (), (), costs)
        >>> print(blocks_text(Step(parts=parts), view))
        block         action  saved  kept  recomputed  recomputing
        ---------  ---------  -----  ----  ----------  -----------
        h.0 to .2  recompute  192 B   0 B       192 B        1.5 s
    """
    headings = ["block", "action", "saved", "kept", "to host", "recomputed"]
    rows = [
        [
            row.name,
            row.action,
            print_bytes(row.saved_bytes),
            print_bytes(row.kept_bytes),
            print_bytes(row.offloaded_bytes),
            print_bytes(row.recomputed_bytes),
            print_seconds(row.replay_seconds),
        ]
        for row in block_rows(step, view, merge=True)
    ]
    if not any(cost.offloaded_bytes for cost in view.costs):
        headings.remove("to host")
        rows = [[*row[:4], *row[5:]] for row in rows]
    return table([*headings, "recomputing"], rows)


def frontier_text(findings: Findings) -> str:
    """Return all plans from the smallest peak to the largest; * is active."""
    rows = [
        [
            ("* " if number == findings.chosen else "  ") + view.name,
            *cost_words(findings, view),
        ]
        for number, view in enumerate(findings.plans)
    ]
    return table(["plan (* active)", "peak", "of plain", "step", "slower"], rows)


def rule_rows(findings: Findings) -> list[list[str]]:
    """Return the active plan and the common rules, by prediction."""
    ours = (f"recoup, {findings.plan.name}", findings.plan)
    rules = [(rule.name, rule) for rule in findings.baselines]
    return [
        [
            name,
            *cost_words(findings, costs),
            fits_words(costs.peak_bytes, findings.budget_bytes),
        ]
        for name, costs in (ours, *rules)
    ]


def comparison_text(findings: Findings) -> str:
    """Return the active plan and the common rules, by prediction, as a table."""
    headings = ["rule", "peak", "of plain", "step", "slower", "fits"]
    return table(headings, rule_rows(findings))


def benchmark_text(entries: Sequence[Entry]) -> str:
    """Return the costs of contenders, compared with the first that ran.

    Examples:
        >>> plain = Entry("plain", 2048, 1.0, 0.0)
        >>> other = Entry("other", 1024, 1.5, 0.25)
        >>> print(
        ...     benchmark_text([plain, other, Entry("large", failure="out of memory")])
        ... )
        contender   peak  share   step  slower     gradients
        ---------  -----  -----  -----  ------  ------------
        plain      2 KiB   100%    1 s       -     same bits
        other      1 KiB    50%  1.5 s  +50.0%  2.5e-01 away
        large          -      -      -       -        note 1
        <BLANKLINE>
        1: out of memory
    """
    base = next((entry for entry in entries if not entry.failure), None)
    notes = list(dict.fromkeys(entry.failure for entry in entries if entry.failure))
    rows = [_contender(entry, base, notes) for entry in entries]
    headings = ["contender", "peak", "share", "step", "slower", "gradients"]
    numbered = [f"{number}: {note}" for number, note in enumerate(notes, 1)]
    return "\n\n".join([table(headings, rows), *numbered])


def benchmark_verdict(entries: Sequence[Entry]) -> str:
    """Return the costs of recoup's leanest plan and of the leanest other tool.

    Examples:
        >>> plain = Entry("plain", 2048, 1.0, 0.0)
        >>> rule = Entry("every block", 1024, 1.5, 0.0)
        >>> ours = Entry("recoup in 1 KiB", 1024, 1.25, 0.0)
        >>> for part in benchmark_verdict([plain, rule, ours]).split("; "):
        ...     print(part)
        recoup in 1 KiB: 50% of the plain peak at +25.0% time, same bits
        every block: 50% at +50.0%, same bits.
        >>> benchmark_verdict([plain, rule])
        'No plan of recoup ran; see the notes.'
    """
    ran = [entry for entry in entries if entry.peak_bytes and entry.seconds]
    ours = [entry for entry in ran[1:] if entry.name.startswith("recoup")]
    if not ours:
        return "No plan of recoup ran; see the notes."
    parts: list[str] = []
    for group in (ours, [entry for entry in ran[1:] if entry not in ours]):
        if group:
            leanest = min(group, key=lambda entry: entry.peak_bytes or 0)
            _, _, share, _, slower, bits = _contender(leanest, ran[0], ())
            words = ("", "") if parts else (" of the plain peak", " time")
            parts.append(
                f"{leanest.name}: {share}{words[0]} at {slower}{words[1]}, {bits}"
            )
    return f"{'; '.join(parts)}."


def estimate_words(estimated_for: str) -> str:
    """Return the note on estimated times; empty if they were measured.

    Examples:
        >>> estimate_words("")
        ''
        >>> estimate_words("h100")[:47]
        'Times are estimates for h100 at peak throughput'
    """
    if not estimated_for:
        return ""
    return (
        f"Times are estimates for {estimated_for} at peak throughput: real steps take "
        "longer. Bytes are exact for the CPU."
    )


def floor_words(findings: Findings) -> str:
    """Return the smallest budget, rounded for reading and exact for copying.

    Examples:
        >>> from recoup.core.graph import Graph
        >>> from recoup.report.composition import Known, compose
        >>> graph = Graph((), 0, (), (), (), (), ())
        >>> floor_words(compose(graph, known=Known(floor_bytes=1030)))
        '1.01 KiB (1030 B)'
    """
    return f"{print_bytes(findings.floor_bytes)} ({findings.floor_bytes} B)"


def main_costs(findings: Findings) -> list[Baseline]:
    """Return the costs of the plain step, and of the plan as predicted and measured."""
    view = findings.plan
    costs = [
        Baseline("plain, predicted", findings.plain_peak_bytes, findings.plain_seconds),
        Baseline("plan, predicted", view.peak_bytes, view.seconds),
    ]
    if findings.measured_peak_bytes:
        measured = findings.measured_peak_bytes, findings.measured_seconds
        costs.append(Baseline("plan, measured", *measured))
    return costs


def summary_text(findings: Findings) -> str:
    """Return the findings: predictions, measurement, peak and blocks."""
    found = timeline(findings.step, findings.plan)
    return "\n\n".join(
        [
            findings.title,
            table(
                ["", "peak", "step"],
                [
                    [
                        each.name,
                        print_bytes(each.peak_bytes),
                        print_seconds(each.seconds),
                    ]
                    for each in main_costs(findings)
                ],
            ),
            f"floor {floor_words(findings)}"
            + (
                f", budget {print_bytes(findings.budget_bytes)}"
                * bool(findings.budget_bytes)
            ),
            f"Memory over the step\n{timeline_text(found)}",
            alive_text(found),
            blocks_text(findings.step, findings.plan),
        ]
    )


def share_words(part: int, whole: int) -> str:
    """Return a part of a whole in percent.

    Examples:
        >>> share_words(1, 4), share_words(1, 0)
        ('25%', '-')
    """
    return f"{part / whole:.0%}" if whole else "-"


def slower_words(seconds: float, plain_seconds: float) -> str:
    """Return the slowdown of a step relative to the plain one.

    Examples:
        >>> slower_words(1.5, 1.0), slower_words(1.0, 0.0)
        ('+50.0%', '-')
    """
    return f"{seconds / plain_seconds - 1:+.1%}" if plain_seconds else "-"


def pace_words(seconds: float, plain_seconds: float) -> str:
    """Compare the time of a step with that of the plain one.

    Examples:
        >>> pace_words(1.5, 1.0), pace_words(0.75, 1.0)
        ('50.0% slower', '25.0% faster')
        >>> pace_words(1.0001, 1.0), pace_words(1.0, 0.0)
        ('as fast as plain', 'as fast as plain')
    """
    share = seconds / plain_seconds - 1 if plain_seconds else 0.0
    if abs(share) < 0.0005:  # 0.0 %
        return "as fast as plain"
    return f"{abs(share):.1%} {'slower' if share > 0 else 'faster'}"


def fits_words(peak_bytes: int, budget_bytes: int) -> str:
    """Return whether a peak is within a budget; a dash if there is none.

    Examples:
        >>> fits_words(3, 2), fits_words(2, 2), fits_words(2, 0)
        ('no', 'yes', '-')
    """
    if not budget_bytes:
        return "-"
    return "yes" if peak_bytes <= budget_bytes else "no"


def cost_words(findings: Findings, costs: PlanView | Baseline) -> list[str]:
    """Return peak and time, each also compared with those of the plain step."""
    return [
        print_bytes(costs.peak_bytes),
        share_words(costs.peak_bytes, findings.plain_peak_bytes),
        print_seconds(costs.seconds),
        slower_words(costs.seconds, findings.plain_seconds),
    ]


def _contender(entry: Entry, base: Entry | None, notes: Sequence[str]) -> list[str]:
    if entry.peak_bytes is None or entry.seconds is None or base is None:
        note = f"note {notes.index(entry.failure) + 1}"
        return [entry.name, "-", "-", "-", "-", note]
    far = entry.difference or 0.0
    same = "same bits" if not far else f"{far:.1e} away"
    return [
        entry.name,
        print_bytes(entry.peak_bytes),
        share_words(entry.peak_bytes, base.peak_bytes or 0),
        print_seconds(entry.seconds),
        "-" if entry is base else slower_words(entry.seconds, base.seconds or 0.0),
        same,
    ]

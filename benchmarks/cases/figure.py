"""The figure of the README: a step of the demonstration's GPT, plain and in a budget.

    python -m benchmarks.cases.figure --out docs/images

Writes `memory.svg` with both on one scale, and `memory.json` with all findings, from
which `recoup report memory.json` makes the page.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import recoup
from recoup.cli.demo_training import encode, read_text
from recoup.cli.gpt import GPT, Shape
from recoup.core.units import print_bytes
from recoup.report.charts import timeline_chart
from recoup.report.findings import Findings, PlanView, to_json
from recoup.report.timeline import timeline

WIDTH, HEIGHT, HEAD, LEGEND = 960, 340, 28, 36
COLOURS = {
    "saved for backward": "#3b6fb6",
    "recomputed": "#e9864a",
    "temporaries of forward": "#2a9d8f",
    "parameters, gradients, batch": "#9aa5b1",
}
"""As `recoup.report.drawing` has them on paper."""


def measure() -> Findings:
    torch.manual_seed(0)
    words = encode(read_text())
    shape = Shape(6, 128, 4, len(set(read_text())), context=128, dropout=0.1)
    model: nn.Module = GPT(shape)
    tokens = words[: 16 * 129].reshape(16, 129)
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    _, report = recoup.fit(model, batch, budget=0.5)
    return report.findings(title="GPT, 6 blocks of width 128, 16 x 128 characters")


def figure(found: Findings) -> str:
    plain = max(found.plans, key=lambda view: view.peak_bytes)
    budget = print_bytes(found.budget_bytes)
    below = HEAD + HEIGHT
    panels = [
        _panel(found, "plain", plain, 0, 0),
        _panel(
            found, f"recoup, budget {budget}", found.plan, below, found.budget_bytes
        ),
    ]
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {WIDTH} {2 * below + LEGEND}" '
        'role="img" font-family="system-ui, sans-serif"><title>Memory over one '
        "training step, plain and within half the peak</title>"
        # Pages that show it may be dark.
        '<rect width="100%" height="100%" fill="#ffffff"/>'
        f"{''.join(panels)}{_legend(2 * below)}</svg>"
    )


def _legend(top: int) -> str:
    drawn, x = "", 84
    for words, colour in COLOURS.items():
        drawn += (
            f'<rect x="{x}" y="{top + 8}" width="14" height="14" fill="{colour}"/>'
            f'<text x="{x + 20}" y="{top + 20}" font-size="14" fill="#1d2733">'
            f"{words}</text>"
        )
        x += 50 + 7 * len(words)
    return drawn


def _panel(
    found: Findings, title: str, view: PlanView, top: int, budget_bytes: int
) -> str:
    chart = timeline_chart(
        timeline(found.step, view),
        budget_bytes=budget_bytes,
        most_bytes=found.plain_peak_bytes,
    ).svg()
    size = f'<svg y="{top + HEAD}" width="{WIDTH}" height="{HEIGHT}" '
    return (
        f'<text x="84" y="{top + HEAD - 4}" font-size="16" font-weight="bold" '
        f'fill="#1d2733">{title}</text>{chart.replace("<svg ", size, 1)}'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    folder: Path = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    found = measure()
    (folder / "memory.svg").write_text(figure(found) + "\n", encoding="utf-8")
    (folder / "memory.json").write_text(to_json(found), encoding="utf-8")
    print(f"plain {print_bytes(found.plain_peak_bytes)}")
    print(f"budget {print_bytes(found.budget_bytes)}")
    print(f"measured {print_bytes(found.measured_peak_bytes)}")
    print(f"slower by prediction {found.plan.seconds / found.plain_seconds - 1:.1%}")


if __name__ == "__main__":
    main()

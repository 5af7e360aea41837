"""How fast and how well plans are found: stacks of blocks, and DTR's traces.

    PYTHONPATH=src python3 -m benchmarks.cases.planning [--out FOLDER]

The traces are looked for in ../shared/data/dtr, or in the folder RECOUP_DTR names;
without them their table is left out.
"""

import argparse
from pathlib import Path

from benchmarks.graphs import transformer_graph
from benchmarks.traces import BASELINES, CELLS, percent
from recoup.core.segments import Action
from recoup.core.simulation import simulate
from recoup.errors import InfeasibleError
from recoup.planners.planner import plan
from tests.support.dtr import has_traces, read_trace

KEEP = frozenset({Action.KEEP})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the tables there as markdown")
    arguments = parser.parse_args()
    lines = [*_stacks(), ""]
    if has_traces():
        lines += _traces()
    text = "\n".join(lines)
    print(text)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "planning.md").write_text(text + "\n")


def _stacks() -> list[str]:
    lines = [
        "| blocks | operators | budget / plain | extra % | bound % | planning s |",
        "|---|---|---|---|---|---|",
    ]
    for blocks in (12, 50, 100):
        graph = transformer_graph(blocks)
        plain = simulate(graph, ()).peak_bytes
        for share in (0.75, 0.5, 0.3):
            found = plan(graph, int(share * plain), allow=KEEP)
            step = graph.step_seconds
            lines.append(
                f"| {blocks} | {len(graph.operations)} | {share} "
                f"| {100 * found.extra_seconds / step:.2f} "
                f"| {100 * found.bound_seconds / step:.2f} "
                f"| {found.seconds_planning:.2f} |"
            )
    return lines


def _traces() -> list[str]:
    lines = [
        "| trace | budget | DTR | global cut | recoup | bound | planning s |",
        "|---|---|---|---|---|---|---|",
    ]
    for (name, share), cell in CELLS.items():
        graph = read_trace(name)
        budget_bytes = int(share * BASELINES[name].peak_megabytes * 1e6)
        try:
            found = plan(graph, budget_bytes, allow=KEEP)
        except InfeasibleError:
            lines.append(f"| {name} | {share} | {cell.dtr} | {cell.cut} | - | - | - |")
            continue
        lines.append(
            f"| {name} | {share} | {cell.dtr} | {cell.cut or '-'} "
            f"| {percent(name, found.extra_seconds):.2f} "
            f"| {percent(name, found.bound_seconds):.2f} "
            f"| {found.seconds_planning:.2f} |"
        )
    return lines


if __name__ == "__main__":
    main()

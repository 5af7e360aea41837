"""Rows of a campaign that many short runs measure, and the file that joins them.

A machine is lent for minutes, and a run may be killed at any moment. So each row is
appended to a journal as soon as it is measured, and again when more of it is: a line of
JSON, with the machine and the run it is from. Several processes may append to one file.

    python -m benchmarks.journal FILE ...

joins journals (and results files of the same rows) with what earlier calls joined, in
`benchmarks/results/campaign_<hardware>.json` and `.md`. Rows of other runs stay: what
is compared is compared within one run.
"""

import argparse
import fcntl
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, markdown_page

RESULTS = Path(__file__).parent / "results"
THEME = "campaign"


class Journal:
    """A file to which rows are appended.

    Args:
        path: The file.
        machine: Where they are measured.
        facts: What all rows of this run have in common, such as its commit.
    """

    def __init__(
        self, path: Path, machine: Mapping[str, str], facts: Mapping[str, Any]
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._machine = dict(machine)
        run = datetime.now(tz=UTC).strftime("%Y-%m-%d %H:%M:%S")
        self._facts = {"run": run, **facts, "torch": machine["torch"]}

    def write(self, rows: Iterable[Row]) -> None:
        """Append rows; a later one replaces those of the same model and contender."""
        lines = [
            json.dumps({"machine": self._machine, "row": {**row, **self._facts}})
            for row in rows
        ]
        with self._path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write("".join(f"\n{line}" for line in lines))


def rows_in(path: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return the machine and the rows of a journal or of a results file.

    A line of a journal may be cut: its process was killed.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        record = json.loads(text)
        machine = record["machine"]
        facts = {
            "run": machine["date"],
            "commit": record["settings"].get("commit", ""),
            "torch": machine.get("torch", ""),
        }
        return machine, [{**facts, **row} for row in record["rows"]]
    entries = [entry for line in text.splitlines() for entry in _read(line)]
    machines = [entry["machine"] for entry in entries]
    _check_device(machines)
    return (machines or [{}])[-1], [entry["row"] for entry in entries]


def _read(line: str) -> list[dict[str, Any]]:
    """Return what a line of a journal says; nothing if it was cut."""
    try:
        return [json.loads(line)]
    except json.JSONDecodeError:
        return []


def _check_device(machines: Sequence[Mapping[str, str]]) -> None:
    devices = {machine["device"] for machine in machines}
    if len(devices) > 1:
        raise ValueError(f"expected rows of one device, got those of {devices}.")


def joined(rows: Iterable[Row]) -> list[Row]:
    """Return the last row of each run, model and contender, by model and run."""
    found = {(row["model"], row["run"], row["contender"]): row for row in rows}
    models = dict.fromkeys(model for model, *_ in found)
    order = {model: number for number, model in enumerate(models)}
    return sorted(found.values(), key=lambda row: (order[row["model"]], row["run"]))


def hardware(machine: Mapping[str, str]) -> str:
    """Return a device's name as it stands in the names of results."""
    return re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-")


def join(paths: Sequence[Path], folder: Path = RESULTS) -> Path:
    """Join files with the rows that are there; return the path of the joined file.

    Raises:
        ValueError: They are of several devices.
    """
    found = [rows_in(path) for path in paths]
    machines = [machine for machine, rows in found if rows]
    _check_device(machines)
    target = folder / f"{THEME}_{hardware(machines[0])}.json"
    known = [rows_in(target)[1]] if target.exists() else []
    rows = joined(row for each in (*known, *(r for _, r in found)) for row in each)
    last = max(str(row["run"]) for row in rows)[:10]
    machine = {name: machines[-1][name] for name in ("device",)} | {"date": last}
    settings = {"rows": "of many runs; commit and torch in each row"}
    record = {"theme": THEME, "machine": machine, "settings": settings, "rows": rows}
    target.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    page = markdown_page(THEME, rows, machine=machine, settings=settings)
    target.with_suffix(".md").write_text(page, encoding="utf-8")
    return target


def is_result(row: Row) -> bool:
    """Return whether a row is more than a start: a time, or why there is none."""
    return "ms" in row or "failed" in row


def is_infeasible(row: Row) -> bool:
    """Return whether no plan fits, which is a result as much as a time."""
    return row.get("failed") == "InfeasibleError"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    print(f"Written to {join(options.files, options.out)} and the .md beside it.")


if __name__ == "__main__":
    main()

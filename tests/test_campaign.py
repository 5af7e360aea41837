"""A campaign of many short runs: nothing measured is lost, and losses are shown."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.journal import Journal, join, rows_in
from benchmarks.page import Campaign

ROOT = Path(__file__).parents[1]
GPU = {"device": "Some GPU", "torch": "2.13.0", "date": "2026-11-20"}


def journal(path: Path, run: str, machine: dict[str, str] = GPU) -> Journal:
    return Journal(path, machine, {"run": run, "commit": f"of {run}"})


def row(contender: str, ms: Any = None, **more: Any) -> dict[str, Any]:
    made = {"model": "t5", "contender": contender, "remark": "", **more}
    return made if ms is None else {**made, "ms": ms, "peak GiB": 2.0, "host ms": 1.0}


class TestJournal:
    def test_a_later_row_replaces_the_start_of_it_and_runs_stay_apart(self, tmp_path):
        first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
        one = journal(first, "1")
        one.write([row("eager")])
        one.write([row("eager", 3.0)])
        journal(second, "2").write([row("eager", 4.0)])
        join([first], tmp_path)
        target = join([second], tmp_path)
        _, rows = rows_in(target)
        found = [(r["run"], r.get("ms"), r["commit"]) for r in rows]
        assert found == [("1", 3.0, "of 1"), ("2", 4.0, "of 2")]
        assert "of 2" in target.with_suffix(".md").read_text()
        join([first, second], tmp_path)
        assert rows_in(target)[1] == rows, "joining again changes nothing"

    def test_a_line_that_was_cut_is_left_out(self, tmp_path):
        path = tmp_path / "a.jsonl"
        journal(path, "1").write([row("eager", 3.0), row("own checkpointing", 5.0)])
        path.write_text(path.read_text()[:-9])
        journal(path, "1").write([row("torch knob 0.0", 4.0)])
        assert [r["contender"] for r in rows_in(path)[1]] == [
            "eager",
            "torch knob 0.0",
        ]

    def test_rows_of_another_device_are_refused(self, tmp_path):
        paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
        journal(paths[0], "1").write([row("eager", 3.0)])
        journal(paths[1], "1", {**GPU, "device": "cpu"}).write([row("eager", 3.0)])
        with pytest.raises(ValueError, match="of one device"):
            join(paths, tmp_path)
        assert not list(tmp_path.glob("*.json"))


class TestTables:
    def cells(self, table: str) -> list[str]:
        (line,) = (line for line in table.splitlines() if "T5" in line)
        return [cell.strip() for cell in line.split("|")[2:-1]]

    def test_a_loss_is_shown_as_plainly_as_a_win_and_what_lacks_is_not_run(self):
        knob, fit = "torch knob 0.5", "fit (inductor) at torch knob 0.5"
        rows = [row(knob, 100.0, run="1"), row(fit, 112.0, run="1")]
        expected = ["not run"] * 2 + ["+12.0 %, 2.0 GiB"] + ["not run"] * 3
        assert self.cells(Campaign(rows).knobs()) == expected

    def test_rows_of_two_runs_are_never_compared(self):
        rows = [
            row("eager", 100.0, run="1"),
            row("fit (inductor) at 50%", 9.0, run="2"),
        ]
        assert self.cells(Campaign(rows).shares()) == ["not run"] * 5
        rows += [row("fit (inductor) at 50%", 90.0, run="1")]
        assert self.cells(Campaign(rows).shares())[3] == "-10.0 %"

    def test_what_fails_is_no_gap(self):
        infeasible = {"failed": "InfeasibleError", "remark": "sets need 4.03 GiB."}
        rows = [
            row("own checkpointing", 100.0, run="1"),
            row("fit (eager) at own checkpointing", **infeasible, run="1"),
            row("fit (exact) at own checkpointing", failed="ValueError", run="1"),
            row("torch knob 1.0", failed="BackendCompilerFailed", run="1"),
        ]
        own = self.cells(Campaign(rows).own())
        assert own[1:] == ["infeasible: 4.03 GiB", "fails: ValueError"]
        knobs = self.cells(Campaign(rows).knobs())
        assert knobs[:2] == ["torch: BackendCompilerFailed", "not run"]

    def test_predictions_name_the_largest_error_and_count_what_exceeds(self):
        costs = {"budget bytes": 100, "predicted bytes": 99, "predicted ms": 9.0}
        rows = [
            row("a", 10.0, run="1", **costs, **{"peak bytes": 95}),
            row("b", 9.0, run="1", **costs, **{"peak bytes": 110}),
        ]
        found = self.cells(Campaign(rows).predictions())
        assert found == ["-10.0 %", "-10.0 %", "1", "2"]


def started(folder: Path, *more: str) -> "subprocess.Popen[str]":
    """Start the benchmark on tiny models, without a C++ compiler."""
    command = [sys.executable, "-m", "benchmarks.cases.ecosystem", "--out", str(folder)]
    command += ["--models", "gpt,u-net", "--own", "eager", "--executors", "exact"]
    command += ["--knobs", "", "--shares", "0.6", "--rounds", "2", "--commit", "c0ffee"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [*command, *more],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_a_killed_run_loses_nothing_and_the_next_one_measures_the_rest(tmp_path):
    path = tmp_path / "rows.jsonl"
    first = started(tmp_path)
    until = time.monotonic() + 300
    while not (path.exists() and '"ms"' in path.read_text()):
        assert first.poll() is None, first.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    written = path.read_text()
    target = join([path], tmp_path)
    known = {(r["model"], r["contender"]) for r in rows_in(target)[1] if "ms" in r}
    assert known, "killed within the rounds"
    second = started(tmp_path, "--missing", str(tmp_path))
    said, _ = second.communicate(timeout=300)
    assert second.returncode == 0, said
    again = path.read_text()
    assert again.startswith(written)
    new = [
        json.loads(line)["row"] for line in again[len(written) :].split("\n") if line
    ]
    fits = {(r["model"], r["contender"]) for r in new if "fit" in r["contender"]}
    assert not fits & known, "what is known is not measured again"
    _, rows = rows_in(join([path], tmp_path))
    wanted = {"fit (eager) at own checkpointing", "fit (exact) at 60%"}
    for model in ("gpt", "u-net"):
        timed = {r["contender"] for r in rows if r["model"] == model and "ms" in r}
        assert timed >= {"eager", "own checkpointing", *wanted}
    assert {r["commit"] for r in rows} == {"c0ffee"}

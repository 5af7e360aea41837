"""Tables of benchmarks are written row by row, and go on later."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.harness import Table


def table(folder: Path, *, steps: int = 2, limit: float = 60.0) -> Table:
    return Table("some-rows", torch.device("cpu"), {"steps": steps}, folder, limit)


def test_rows_are_written_one_by_one_and_measured_once(tmp_path):
    assert table(tmp_path).row("a", "plain", lambda: {"ms": 3.0})["ms"] == 3.0
    (file,) = tmp_path.glob("some-rows_cpu_*.json")
    assert [row["ms"] for row in json.loads(file.read_text())["rows"]] == [3.0]

    def fail() -> dict[str, float]:
        raise ValueError("too large")

    again = table(tmp_path)
    assert again.row("a", "plain", fail)["ms"] == 3.0
    assert again.row("b", "plain", fail)["remark"] == "ValueError: too large"
    assert len(table(tmp_path).rows) == 2
    assert table(tmp_path, steps=3).rows == [], "other settings, another table"


def test_no_row_is_begun_after_the_limit(tmp_path):
    late = table(tmp_path, limit=-1.0)
    with pytest.raises(TimeoutError, match="plain of a"):
        late.row("a", "plain", lambda: {"ms": 3.0})
    assert list(tmp_path.iterdir()) == []

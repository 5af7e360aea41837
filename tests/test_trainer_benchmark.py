"""The benchmark of transformers' Trainer is written row by row, and goes on later."""

import argparse
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from benchmarks.cases.hf_trainer import Table


def table(folder: Path, **settings: float) -> Table:
    options = {"steps": 2, "small": True, "limit": 60.0, "out": folder, **settings}
    return Table(torch.device("cpu"), argparse.Namespace(**options))


def test_rows_are_written_one_by_one_and_measured_once(tmp_path):
    assert table(tmp_path).row("a", "plain", lambda: {"ms": 3.0})["ms"] == 3.0
    (file,) = tmp_path.glob("hf-trainer_cpu_*.json")
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

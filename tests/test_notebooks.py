"""The notebooks run from top to bottom, and show what they show in the files."""

import json
from pathlib import Path

import pytest

from tests.support.notebooks import executed, outputs_of, words_of

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def test_there_are_two_notebooks():
    names = [path.stem for path in NOTEBOOKS]
    assert names == ["first-fit", "plan-without-a-gpu"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_the_stored_outputs(path, tmp_path, monkeypatch):
    """Amounts of time and memory may differ; words and kinds of output may not."""
    monkeypatch.chdir(tmp_path)
    stored = json.loads(path.read_text(encoding="utf-8"))
    again = executed(stored)
    for cell, now in zip(stored["cells"], again["cells"], strict=True):
        shown, found = cell.get("outputs", []), now.get("outputs", [])
        assert list(map(words_of, shown)) == list(map(words_of, found))
    kinds = {
        kind
        for cell in stored["cells"]
        for output in cell.get("outputs", [])
        for kind in output.get("data", {})
    }
    assert "text/html" in kinds


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_of_format_4_as_jupyter_reads_it(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    common = {"id", "cell_type", "metadata", "source"}
    more = {"code": {"outputs", "execution_count"}, "markdown": set[str]()}
    for cell in cells:
        assert set(cell) == common | more[cell["cell_type"]]


def test_what_differs_in_words_or_kind_is_found():
    shown = outputs_of("print('peak 3 MiB')", {}, 1)[0]
    for same in ("print('peak 4.5 KiB')", "print('peak  12 B')"):
        assert words_of(outputs_of(same, {}, 1)[0]) == words_of(shown)
    for other in ("print('floor 3 MiB')", "'peak 3 MiB'"):
        assert words_of(outputs_of(other, {}, 1)[0]) != words_of(shown)
    with pytest.raises(ZeroDivisionError):
        executed({"cells": [{"cell_type": "code", "source": ["1 / 0"]}]})

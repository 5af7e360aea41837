"""Every example runs, says something, and stays small."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.twin import leftovers

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
NAMES = [example.name for example in EXAMPLES]
EXPECTED = {
    # SciRS2-autograd.
    "simple_checkpointing.py",
    "gradient_checkpointing.py",
    "enhanced_gradient_checkpointing.py",
    "flexible_checkpointing.py",
    # MLFramework.
    "manual_scopes.py",
    "manager.py",
    "checkpointed_layer.py",
    # Tangent.
    "loop_rnn.py",
    "loop_lstm.py",
    "loop_heat.py",
    "loop_unknown_length.py",
}


def test_the_examples_of_the_seeds_are_there():
    assert set(NAMES) >= EXPECTED


NEEDED = {"timm_training.py": "timm"}
"""Packages that an example needs and the tests do not install."""

BY_TORCHRUN = {"torchtitan_style.py"}
"""Examples of several processes only, which tests/train/test_torchrun.py starts."""

ALONE = [each for each in EXAMPLES if each.name not in BY_TORCHRUN]


@pytest.mark.parametrize("example", ALONE, ids=lambda example: example.name)
def test_an_example_runs_and_says_something(example, capsys):
    if example.name in NEEDED:
        pytest.importorskip(NEEDED[example.name])
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert "bitwise" in printed or "the same as" in printed
    assert list(leftovers()) == []


def test_an_example_runs_as_a_program():
    result = subprocess.run(
        [sys.executable, "-W", "error", str(FOLDER / "manual_scopes.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "Replays: {'layer1': 1, 'layer4': 1}" in result.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_an_example_is_small_and_checks_its_gradients(example):
    text = example.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 100
    assert re.search(r"assert all\(map\(torch\.equal, ", text)


def test_the_page_lists_every_example_and_no_other():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[(\w+\.py)\]", page, re.MULTILINE)) == NAMES

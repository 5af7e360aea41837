"""The command `recoup table`: the four rows, as text and as JSON."""

import json

import pytest

from recoup.cli.main import run
from recoup.cli.statuses import USAGE

STEPS = """
import torch
from torch import nn

def layer():
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))

def make():
    return nn.Sequential(*(layer() for _ in range(4))), torch.ones(256, 16), torch.sum

def pair():
    model, batch, _ = make()
    return model, (batch, batch), nn.functional.mse_loss

def own_step():
    model, batch, loss = make()
    return {"model": model, "step": lambda: loss(model(batch)).backward()}
"""


@pytest.fixture
def steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.py").write_text(STEPS)
    return "steps.py"


@pytest.mark.parametrize("function", ["make", "pair"])
def test_the_four_rows_as_json(steps, capsys, function):
    assert run(["table", f"{steps}:{function}", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    full, mixed, checkpointed, both = (row["peak_bytes"] for row in said["rows"])
    assert said["precision"] == "bf16"
    assert 0 < checkpointed < full
    assert 0 < both < mixed


def test_the_four_rows_as_text(steps, capsys):
    assert run(["table", f"{steps}:make", "--precision", "fp16"]) == 0
    said = capsys.readouterr().out
    assert "Baseline (FP32)" in said
    assert "computes in fp16" in said


def test_segment_size_recomputes_blocks_together(steps, capsys):
    peaks = []
    for options in ([], ["--segment-size", "4"]):
        assert run(["table", f"{steps}:make", "--json", *options]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        peaks.append([row["peak_bytes"] for row in rows])
    assert peaks[0][0] == peaks[1][0]
    # All four layers are alive at once in backward.
    assert peaks[0][2] < peaks[1][2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["steps.py:own_step"],
        ["steps.py:make", "--precision", "fp8"],
        ["steps.py:make", "--segment-size", "0"],
    ],
)
def test_incomparable_targets_are_refused(steps, arguments):
    assert run(["table", *arguments]) == USAGE

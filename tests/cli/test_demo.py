"""The demonstration distinguishes equal from unequal runs, and always ends cleanly."""

import functools
import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from recoup.cli import demo_training as training
from recoup.cli import work
from recoup.cli.main import run
from recoup.cli.statuses import FAILED, INTERRUPTED, USAGE
from recoup.errors import UsageError


def row(output, name):
    """Return the cells of the table row that begins with `name`."""
    (line,) = (line for line in output.splitlines() if line.startswith(f"│ {name} "))
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


def test_one_table_with_equal_runs_and_status_zero(capsys, tmp_path):
    page = tmp_path / "demo.html"
    assert run(["demo", "--small", "--steps", "3", "--page", str(page)]) == 0
    output = capsys.readouterr().out
    assert "demo.html" in output.replace("\n", "")
    assert page.read_text(encoding="utf-8").lower().startswith("<!doctype html>")
    assert output.lstrip().startswith("Fits in half the memory")
    assert "losses and gradients equal in every bit" in " ".join(output.split())
    assert output.count("┏") == 1
    assert row(output, "loss curves equal")[1] == "yes"
    assert row(output, "gradients bitwise equal")[1] == "yes"
    assert float(row(output, "peak memory")[2]) <= 0.5
    assert float(row(output, "saved for backward")[2]) < 0.5
    assert "The plan: budget" in output
    assert 1 < float(row(output, "operations of a step")[2]) < 4 / 3 + 0.01
    for name in ("peak memory", "saved for backward"):
        assert re.fullmatch(r"[\d.]+ [KMG]iB", row(output, name)[0])
    assert re.fullmatch(r"[\d.]+ (ms|s)", row(output, "time of a step")[1])


def test_one_object_for_programs(capsys):
    assert run(["demo", "--small", "--steps", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["losses_equal"] is True
    assert found["gradients_equal"] is True
    assert found["fitted"]["peak_bytes"] <= found["budget_bytes"]
    assert found["plain"]["peak_bytes"] // 2 == found["budget_bytes"]
    assert found["plain"]["losses"] == found["fitted"]["losses"]


@pytest.mark.parametrize(
    ("load", "device", "is_busy"),
    [(0.0, "cpu", False), (1000.0, "cpu", True), (1000.0, "meta", False)],
)
def test_other_programs_are_reported_where_they_disturb_timings(
    monkeypatch, load, device, is_busy
):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    warning = work.other_work(torch.device(device))
    assert ("load 1000.0" in warning) is is_busy
    assert bool(warning) is is_busy


def test_a_wrong_gradient_is_shown_and_gives_status_one(capsys, monkeypatch):
    def wrong(settings, budget_bytes, model, optimizer, text):
        # Right in forward, wrong in backward by the least possible difference.
        model.blocks[0].register_forward_hook(
            lambda block, args, out: (
                out.register_hook(lambda g: g * (1 + 2**-20)) and None
            )
        )

    monkeypatch.setattr(training, "fit_to_budget", wrong)
    assert run(["demo", "--small", "--steps", "1"]) == 1
    output = capsys.readouterr().out
    assert row(output, "loss curves equal")[1] == "yes"
    assert row(output, "gradients bitwise equal")[1] == "no"


def test_a_wrong_loss_is_shown_and_gives_status_one(capsys, monkeypatch):
    def wrong(settings, budget_bytes, model, optimizer, text):
        torch.rand(1)

    monkeypatch.setattr(training, "fit_to_budget", wrong)
    assert run(["demo", "--small", "--steps", "2"]) == 1
    assert row(capsys.readouterr().out, "loss curves equal")[1] == "no"


def test_a_nondeterministic_kernel_is_reported(capsys, monkeypatch):
    def unrepeatable(settings, budget_bytes, model, optimizer, text):
        # An operator without a deterministic kernel, even on the CPU.
        torch.zeros(4).put_(torch.tensor([0]), torch.ones(1), accumulate=False)

    monkeypatch.setattr(training, "fit_to_budget", unrepeatable)
    assert run(["demo", "--small", "--steps", "1"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "put_" in output.split("Some bits may differ by chance:")[1]


@pytest.mark.parametrize("steps", ["0", "-1", "many", "1.5"])
def test_an_invalid_number_of_steps_is_refused_in_one_sentence(capsys, steps):
    assert run(["demo", f"--steps={steps}"]) == USAGE
    message = capsys.readouterr().err
    assert "--steps" in message
    assert "Invalid value" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "sentence", "status"),
    [
        (UsageError("a [scope] needs a name."), "a [scope] needs a name.", USAGE),
        (torch.OutOfMemoryError("many\n" * 9), "try again with --small.", FAILED),
    ],
)
def test_an_error_is_one_sentence(capsys, monkeypatch, error, sentence, status):
    def fail(settings, budget_bytes, model, optimizer, text):
        raise error

    monkeypatch.setattr(training, "fit_to_budget", fail)
    assert run(["demo", "--small", "--steps", "1"]) == status
    message = capsys.readouterr().err
    assert message.endswith(f"{sentence}\n")
    assert message.count("\n") == 1


@pytest.mark.slow
def test_an_interrupt_leaves_a_clean_terminal_and_exits_with_130():
    screen, terminal = os.openpty()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "recoup.cli.main",
            "demo",
            "--small",
            "--steps",
            "100000",
        ],
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)},
        # Background jobs of a shell ignore interrupts by default.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    os.close(terminal)
    shown = b""
    while b"plain" not in shown:
        shown += os.read(screen, 1024)
    process.send_signal(signal.SIGINT)
    try:
        while more := os.read(screen, 1024):
            shown += more
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(screen)
    assert process.wait() == INTERRUPTED
    assert b"Traceback" not in shown
    assert b"recoup: interrupted." in shown
    # The cursor that the progress bar hid is shown again.
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l")

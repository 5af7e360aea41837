"""Every command through its real entry point: its output, files, and exit status."""

import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from recoup.cli.commands import COMMANDS
from recoup.cli.main import run
from recoup.cli.statuses import FAILED, FILE, INFEASIBLE, INTERRUPTED, TARGET, USAGE
from recoup.core.compiled_plan import CompiledPlan
from recoup.core.graph import Graph
from recoup.core.plan import Place, Plan, Span
from recoup.core.version import VERSION
from recoup.fitting.benchmark import PEERS, PLAIN
from recoup.report.composition import Known, compose
from recoup.report.findings import from_json, to_json
from recoup.report.timeline import timeline

ROOT = Path(__file__).parents[2]
ENTRY = "import sys; from recoup.cli.main import main; sys.argv[0] = 'recoup'; main()"

STEPS = """
import torch
from torch import nn

def layer():
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))

def make():
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for _ in range(4))), torch.ones(256, 16), torch.sum

def named():
    model, batch, loss = make()
    optimizer = torch.optim.Adam(model.parameters())
    return {"model": model, "batch": batch, "loss": loss, "optimizer": optimizer}

def moved_on():
    made = named()
    made["loss"](made["model"](made["batch"])).backward()
    made["optimizer"].step()
    made["optimizer"].zero_grad()
    return made

def own_step():
    model, batch, loss = make()
    return {"model": model, "step": lambda: loss(model(batch)).backward()}

def raises():
    raise ValueError("the data is not there")

def wrong():
    return 3

def short():
    return (make()[0],)

def strange():
    return {"net": 1}

def no_loss():
    return make()[:2]

def moved():
    model, batch, loss = make()
    return model.to("cpu"), batch, loss

def looks():
    model, batch, loss = make()
    return model, batch, lambda out: out[out > 0].sum()

def huge():
    model = nn.Sequential(*(nn.Linear(60_000, 60_000) for _ in range(8)))
    optimizer = torch.optim.Adam(model.parameters())
    return model, torch.ones(64, 60_000), torch.sum, optimizer

def exits():
    raise SystemExit(0)

class Exits(nn.Module):
    def forward(self, x):
        raise SystemExit

def exits_in_forward():
    return Exits(), torch.ones(3), torch.sum

def mismatched():
    model, _, loss = make()
    return model, torch.ones(256, 15), loss

def divides():
    model, batch, _ = make()
    return model, batch, lambda out: 1 / 0

def bad_loss():
    model, batch, _ = make()
    return model, batch, torch.det

def bad_shape():
    model, batch, _ = make()
    return model, batch, lambda out: out.view(-1, 7).sum()

def bad_norm():
    return nn.Sequential(nn.BatchNorm1d(4)), torch.ones(3, 5), torch.sum

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise ValueError("not written yet")

def bad_backward():
    model, batch, loss = make()
    return model, batch, lambda out: loss(Backward.apply(out))

def bad_step():
    return {"model": make()[0], "step": lambda: [][1]}

def no_model():
    return "model", torch.ones(3), torch.sum

def no_optimizer():
    return *make(), "adam"

def no_step():
    return {"model": make()[0], "step": 3}

def no_function():
    return *make()[:2], "sum"

def no_batch():
    return {"model": make()[0]}

number = 3
"""


SIZED = """
import torch
from torch import nn

def make(size):
    layers = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))]
    layers += [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))]
    return nn.Sequential(*layers), torch.ones(size, 16), torch.sum

def make_step(size):
    model, batch, _ = make(size)
    def step(batch):
        for half in batch.chunk(2):
            model(half).sum().backward()
    return {"model": model, "batch": batch, "step": step}

def no_batch(size):
    return {"model": make(size)[0], "step": lambda: None}
"""


@pytest.fixture
def steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "broken.py").write_text("import no_such_thing\n")
    (tmp_path / "worse.py").write_text("1 / 0\n")
    (tmp_path / "leaves.py").write_text("import sys; sys.exit()\n")
    hostile = Plan((Span(Place("\ud800", 0, True), Place("h", 0, True)),))
    (tmp_path / "hostile-plan.json").write_text(hostile.to_json())
    found = compose(Graph((), 0, (), (), (), (), ()), known=Known(title="\x1b[2J"))
    (tmp_path / "hostile-findings.json").write_text(to_json(found))
    return "steps.py"


def recoup(
    *arguments: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the program through its entry point, in its own process."""
    return subprocess.run(
        [sys.executable, "-c", ENTRY, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_entry_point_and_the_version_match_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"recoup": "recoup.cli.main:main"}
    assert project["version"] == VERSION
    assert recoup("--version").stdout == f"recoup {VERSION}\n"


def test_help_names_every_command_and_every_exit_status():
    text = recoup("--help").stdout
    for command in COMMANDS:
        assert f" {command.__name__.replace('_', '-')} " in text
    for status in (0, 1, 2, 3, 4, 5, 130):
        assert str(status) in text


def test_without_arguments_it_prints_its_help(capsys):
    assert run([]) == 0
    nothing = capsys.readouterr()
    assert run(["--help"]) == 0
    assert (nothing.out, nothing.err) == (capsys.readouterr().out, "")


def test_help_is_fast_and_does_not_import_torch():
    code = (
        "import sys; from recoup.cli.main import run; run(['fit', '--help']);"
        "print('torch' in sys.modules, 'scipy' in sys.modules)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.endswith("False False\n")
    # CPU time, not wall-clock time: other programs do not count.
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < 1.0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own
def test_fit_with_compiled_blocks_prints_and_writes_its_plan(steps, tmp_path, capsys):
    asked = ["fit", f"{steps}:named", "--budget", "100%", "--compile", "exact"]
    files = ["--plan", "plan.json", "--page", "page.html", "--findings", "found.json"]
    assert run([*asked, "--json", *files]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["measured_peak_bytes"] <= said["budget_bytes"]
    assert said["difference"] == 0
    assert said["compiled"] == ["0", "1", "2", "3"]
    plan = CompiledPlan.from_json((tmp_path / "plan.json").read_text())
    assert [block.module for block in plan.blocks] == said["compiled"]
    found = from_json((tmp_path / "found.json").read_text())
    assert found.plan.peak_bytes == said["predicted_peak_bytes"]
    assert found.plain_peak_bytes == said["plain_peak_bytes"]
    assert {view.peak_bytes for view in found.plans} >= {found.plain_peak_bytes}
    assert found.baselines == ()  # their times were measured otherwise
    # As drawn: the highest section of each is its peak.
    for view in found.plans:
        drawn = timeline(found.step, view)
        sums = [sum(c) for c in zip(*(x.bytes_at for x in drawn.layers), strict=True)]
        assert max(sums) == sums[view.peak_moment] == view.peak_bytes
    assert "steps.py:named" in (tmp_path / "page.html").read_text()
    assert run(["explain", "plan.json"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Compiled blocks (exact) that save for backward" in text


def test_fit_prints_writes_and_agrees_with_its_files(steps, tmp_path, capsys):
    status = run(
        [
            *("fit", f"{steps}:named", "--budget", "80%", "--json", "--points", "3"),
            *("--page", "page.html", "--plan", "plan.json"),
            *("--findings", "findings.json"),
        ]
    )
    assert status == 0
    said = json.loads(capsys.readouterr().out)
    assert said["measured_peak_bytes"] <= said["budget_bytes"]
    assert said["measured_peak_bytes"] < said["plain_peak_bytes"]
    found = from_json((tmp_path / "findings.json").read_text())
    assert found.budget_bytes == said["budget_bytes"]
    assert found.plan.peak_bytes == said["predicted_peak_bytes"]
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert len(plan.spans) == said["regions"]
    assert "steps.py:named" in (tmp_path / "page.html").read_text()
    assert not list(tmp_path.glob(".recoup-*"))

    assert run(["explain", "plan.json"]) == 0
    assert "Plan for a budget of" in capsys.readouterr().out
    assert run(["explain", "plan.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["regions"] == said["regions"]

    figures = ["--memory", "memory.png", "--chart", "chart.svg"]
    figures += ["--trace", "trace.json"]
    assert run(["report", "findings.json", "--out", "again.html", *figures]) == 0
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "chart.svg").read_text().startswith("<svg")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert "wrote again.html" in capsys.readouterr().out
    assert (tmp_path / "again.html").read_text() == (tmp_path / "page.html").read_text()


def test_fit_as_text_shows_the_step_the_blocks_and_the_rules(steps, capsys):
    assert run(["fit", f"{steps}:make", "--budget", "80%", "--points", "2"]) == 0
    text = capsys.readouterr().out
    for words in ("plan, measured", "in use at the peak", "block 0", "square root"):
        assert words in text


def test_an_idle_machine_is_not_reported_as_noisy(steps, capsys, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0,) * 3)
    assert run(["measure", "steps.py:make", "--budget", "0.8"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Fits: peak")
    assert "Noise" not in out


TIMING = {
    "compare": ["--budget", "90%"],
    "demo": ["--small", "--steps", "1"],
    "fit": ["--budget", "0.7", "--points", "2"],
    "frontier": ["--points", "2"],
    "largest-batch": ["--budget", "200kB", "--limit", "8"],
    "measure": [],
    "report": ["--budget", "0.7"],
    "table": [],
}
VERDICTS = {
    "compare": r"recoup in .* of the plain peak at [+-].* time, same bits; torch ",
    "demo": r"Fits in half the memory: peak .*; losses and gradients equal in every ",
    "fit": r"Fits: peak .* \(measured\) of a budget of ",
    "frontier": r"The plain step takes .*; the smallest budget that can be met is ",
    "largest-batch": r"batch 8 \(plain 8\) in a budget of 195\.31 KiB: ",
    "measure": r"The plain step takes .*; the smallest budget that can be met is ",
    "report": r"Fits: peak .* \(measured\) of a budget of ",
    "table": r"Least memory: .* of the baseline's memory and .* of its time\.",
}
"""The beginnings of the first lines of each command that measures."""


@pytest.mark.parametrize("command", TIMING)
def test_a_command_that_measures_starts_with_a_verdict_and_reports_noise(
    steps, capsys, monkeypatch, command
):
    """And no line is wider than 80 columns."""
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0,) * 3)
    monkeypatch.setenv("COLUMNS", "80")
    Path("sized.py").write_text(SIZED)
    target = {"demo": [], "largest-batch": ["sized.py:make"]}
    asked = [command, *target.get(command, ["steps.py:make"]), *TIMING[command]]
    assert run(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(VERDICTS[command], " ".join(lines[:3]))
    assert "Noise: other programs were running" in " ".join(lines)
    assert [line for line in lines if len(line) > 80] == []
    assert run([*asked, "--json"]) == 0
    assert "load 1000.0" in json.loads(capsys.readouterr().out)["busy"]


def test_every_command_is_checked_for_a_verdict():
    names = {command.__name__.replace("_", "-") for command in COMMANDS}
    assert names - set(TIMING) == {"explain", "doctor"}  # which time nothing


def test_the_plan_of_every_pass_is_explained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    passes = [
        Plan((Span(Place(name, 0, True), Place(name, 0, False)),)) for name in "ab"
    ]
    whole = Plan(passes=tuple(passes), order=(0, 1), budget_bytes=4096)
    (tmp_path / "plan.json").write_text(whole.to_json())
    assert run(["explain", "plan.json"]) == 0
    text = capsys.readouterr().out
    assert "Forward has 2 regions" in text
    assert "- a: keeps nothing" in text
    assert "- b: keeps nothing" in text
    assert run(["explain", "plan.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["regions"] == 2


def test_explain_and_report_need_no_torch(tmp_path):
    (tmp_path / "plan.json").write_text(Plan().to_json())
    code = (
        "import sys; from recoup.cli.main import run; run(['explain', 'plan.json']);"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "all values are kept" in done.stdout
    assert done.stdout.endswith("False\n")


def test_measure_and_frontier_as_json(steps, tmp_path, capsys):
    assert run(["measure", f"{steps}:own_step", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert 0 < measured["floor_bytes"] < measured["plain_peak_bytes"]

    chart = ["--chart", "chart.svg"]
    assert run(["frontier", f"{steps}:make", "--json", "--points", "3", *chart]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    peaks = [plan["peak_bytes"] for plan in plans]
    assert peaks == sorted(peaks)
    assert (tmp_path / "chart.svg").read_text().startswith("<svg")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own
def test_frontier_of_compiled_blocks(steps, capsys):
    asked = ["frontier", f"{steps}:named", "--compile", "exact", "--points", "3"]
    assert run([*asked, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["executor"] == "exact"
    peaks = [plan["peak_bytes"] for plan in said["plans"]]
    assert peaks
    assert peaks == sorted(peaks)
    assert run(asked) == 0
    assert "With blocks compiled (exact), the step" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own
def test_measure_of_compiled_blocks_names_the_budgets_that_fit_meets(steps, capsys):
    asked = ["measure", f"{steps}:named", "--compile", "exact"]
    assert run([*asked, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["executor"] == "exact"
    assert [name for kind in said["kinds"] for name in kind["blocks"]] == list("0123")
    assert all(kind["options"] for kind in said["kinds"])
    floor = ["--budget", str(said["floor_bytes"]), "--compile", "exact", "--json"]
    assert run(["fit", f"{steps}:named", *floor]) == 0
    fitted = json.loads(capsys.readouterr().out)
    assert fitted["measured_peak_bytes"] == said["floor_bytes"] < said["peak_bytes"]
    assert run(asked) == 0
    assert "With blocks compiled (exact), the step" in capsys.readouterr().out


@pytest.mark.parametrize("function", ["make", "own_step"])
def test_compare_measures_every_contender_on_the_same_step(steps, capsys, function):
    budgets = ["--budget", "80%", "--budget", "1KiB"]
    assert run(["compare", f"{steps}:{function}", "--json", *budgets]) == 0
    *others, fitted, impossible = json.loads(capsys.readouterr().out)["contenders"]
    plain = others[0]
    assert [entry["name"] for entry in others] == [PLAIN, *PEERS]
    assert all(entry["difference"] == 0.0 for entry in (*others, fitted))
    assert fitted["peak_bytes"] <= 0.8 * plain["peak_bytes"]
    assert impossible["peak_bytes"] is None
    assert "cannot be met" in impossible["failure"]


def test_measure_frontier_and_compare_as_text(steps, capsys):
    assert run(["measure", f"{steps}:make"]) == 0
    assert "smallest peak" in capsys.readouterr().out
    assert run(["frontier", f"{steps}:make", "--points", "2"]) == 0
    assert "of plain" in capsys.readouterr().out
    assert run(["compare", f"{steps}:make"]) == 0
    text = capsys.readouterr().out
    assert "torch checkpoint, every block" in text
    assert "recoup in" in text


@pytest.mark.parametrize("function", ["make", "own_step", "moved"])
def test_a_dry_measurement_reports_the_bytes_of_the_real_one(steps, capsys, function):
    assert run(["measure", f"{steps}:{function}", "--json"]) == 0
    real = json.loads(capsys.readouterr().out)
    dry = ["--dry", "--device", "h100", "--json"]
    assert run(["measure", f"{steps}:{function}", *dry]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (real["estimated_for"], said["estimated_for"]) == ("", "h100")
    timed = {"step_seconds", "estimated_for", "link_bytes_per_second", "busy"}
    assert {k: said[k] for k in said.keys() - timed} == {
        k: real[k] for k in real.keys() - timed
    }


def test_a_model_larger_than_this_machine_is_planned_for_another(steps, capsys):
    dry = ["--dry", "--device", "h200", "--json"]
    budget = ["--budget", "480GiB"]
    assert run(["measure", f"{steps}:huge", *dry, *budget]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["plain_peak_bytes"] > 200 << 30
    assert said["planned_peak_bytes"] <= said["budget_bytes"] == 480 << 30
    # Parameters, gradients and two moments: Adam's state counts as well.
    assert said["planned_peak_bytes"] > 4 * 8 * 60_000**2 * 4
    assert run(["measure", f"{steps}:huge", *dry, "--budget", "141GB"]) == INFEASIBLE
    assert "cannot be met" in capsys.readouterr().err


@pytest.mark.parametrize("function", ["make", "named", "moved_on"])
def test_every_figure_includes_the_later_state_of_the_optimizer(
    steps, capsys, function
):
    def said(*arguments: str) -> dict[str, Any]:
        assert run([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    fitted = said("fit", f"{steps}:{function}", "--budget", "100%", "--points", "2")
    for dry in ([], ["--dry"]):
        measured = said("measure", f"{steps}:{function}", *dry)
        plans = said("frontier", f"{steps}:{function}", "--points", "2", *dry)["plans"]
        for found in (
            (measured["floor_bytes"], measured["plain_peak_bytes"]),
            (plans[0]["peak_bytes"], plans[-1]["peak_bytes"]),
        ):
            assert found == (fitted["floor_bytes"], fitted["plain_peak_bytes"])


@pytest.mark.parametrize(
    "command", [["measure"], ["fit", "--points", "2"], ["frontier", "--points", "2"]]
)
@pytest.mark.parametrize(
    ("function", "is_counted"), [("make", False), ("named", True), ("own_step", True)]
)
def test_a_missing_optimizer_is_named(steps, capsys, command, function, is_counted):
    name, *others = command
    assert run([name, f"{steps}:{function}", *others]) == 0
    out = capsys.readouterr().out
    assert ("No optimizer was given" in out) is not is_counted
    # Two moments of 4 layers with two matrices of 16 by 64 and their biases.
    moments_kib = 2 * 4 * (2 * 16 * 64 + 64 + 16) * 4 / 1024
    assert (f"AdamW takes {moments_kib} KiB" in out) is not is_counted


@pytest.mark.parametrize("command", ["measure", "fit"])
def test_the_printed_floor_is_the_smallest_feasible_budget(steps, capsys, command):
    assert (
        run([command, f"{steps}:named", *(["--points", "2"] * (command == "fit"))]) == 0
    )
    found = re.search(r"(?:exactly +|floor .*\()(\d+) B", capsys.readouterr().out)
    assert found is not None
    floor_bytes = int(found[1])
    asked = [command, f"{steps}:named", "--budget"]
    assert run([*asked, f"{floor_bytes}"]) == 0
    capsys.readouterr()
    assert run([*asked, f"{floor_bytes - 1}"]) == INFEASIBLE
    told = re.findall(r"Give it (\d+) bytes", capsys.readouterr().err)
    assert told == [f"{floor_bytes}"]


def test_dry_measurements_label_their_times_as_estimates(steps, capsys):
    dry = ["--dry", "--device", "a100"]
    assert run(["measure", f"{steps}:named", *dry, "--budget", "90%"]) == 0
    out = capsys.readouterr().out
    assert "estimates for a100" in out
    assert "peak with the plan" in out
    assert run(["frontier", f"{steps}:make", *dry, "--points", "2"]) == 0
    assert "estimates for a100" in capsys.readouterr().out


def test_doctor_reports_versions_and_devices(capsys):
    assert run(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["works"] is True
    assert said["devices"][0]["name"] == "cpu"
    assert run(["doctor"]) == 0
    assert "recoup works" in capsys.readouterr().out


def test_doctor_finds_a_device_that_does_not_work(monkeypatch, capsys):
    monkeypatch.setattr("recoup.cli.examination.gradients_equal", lambda _: False)
    assert run(["doctor"]) == FAILED
    assert capsys.readouterr().out.rstrip().endswith("no")


def test_demo_has_a_help_text(capsys):
    assert run(["demo", "--help"]) == 0
    text = capsys.readouterr().out
    assert "GPT" in text
    assert "--steps" in text


@pytest.mark.parametrize("budget", ["0.9", "90%", "1Gi", "0.5G", "7.91MiB"])
def test_budgets_are_accepted_in_common_notations(budget, steps, capsys):
    asked = ["fit", f"{steps}:make", "--budget", budget, "--json", "--points", "2"]
    assert run(asked) == 0
    said = json.loads(capsys.readouterr().out)
    if budget in ("0.9", "90%"):
        assert said["budget_bytes"] == int(0.9 * said["plain_peak_bytes"])


def test_a_budget_may_come_from_the_environment(steps, capsys, monkeypatch):
    monkeypatch.setenv("RECOUP_BUDGET", "1KiB")
    asked = ["fit", f"{steps}:make", "--json", "--points", "2"]
    assert run(asked) == INFEASIBLE
    capsys.readouterr()
    assert run([*asked, "--budget", "1GiB"]) == 0
    assert json.loads(capsys.readouterr().out)["budget_bytes"] == 1 << 30


def test_the_largest_batch_is_found(tmp_path, capsys):
    file = tmp_path / "sized.py"
    file.write_text(SIZED)
    asked = ["largest-batch", f"{file}:make", "--budget", "200kB", "--slowdown", "9"]
    assert run([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["size"] > found["plain_size"]
    assert found["measured_peak_bytes"] <= found["budget_bytes"] == 200_000
    assert run([*asked, "--limit", "3"]) == 0
    assert capsys.readouterr().out.startswith("batch 3 ")
    assert run([*asked, "--json", "--compile", "exact"]) == 0
    compiled = json.loads(capsys.readouterr().out)
    assert (found["executor"], compiled["executor"]) == (False, "exact")
    assert compiled["size"] == found["size"]
    # Each half of the batch needs half of the memory.
    asked[1] = f"{file}:make_step"
    assert run([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["size"] > 1.5 * found["size"]
    assert run(asked[:2]) == USAGE
    assert "expected a budget on a CPU" in capsys.readouterr().err
    asked[1] = f"{file}:no_batch"
    assert run(asked) == TARGET
    assert "a batch of the size, got a step alone" in capsys.readouterr().err


WRONG = [
    (["largest-batch", "steps.py:make", "--budget", "1MB"], TARGET, "raised TypeError"),
    (["largest-batch", "steps.py:make", "--budget", "50%"], TARGET, "raised TypeError"),
    (["largest-batch", "steps.py:make", "--compile", "fast"], USAGE, "exact, inductor"),
    (["fit", "steps.py:make", "--budget", "8 bananas"], USAGE, "bananas"),
    (["fit", "steps.py:make", "--budget", "0"], USAGE, "a positive budget"),
    (["fit", "steps.py:make", "--budget", "120%"], USAGE, "up to 100%"),
    (["fit", "steps.py:make", "--budget", "x%"], USAGE, "up to 100%"),
    (["fit", "steps.py:make", "--budget", "1KiB"], INFEASIBLE, "cannot be met"),
    (["fit", "steps.py:make", "--points", "1"], USAGE, "points"),
    (["fit", "steps.py:make", "--compile", "fast"], USAGE, "exact, inductor or auto"),
    (["fit", "steps.py:make", "--page", "no/such/page.html"], FILE, "no folder"),
    (["fit", "steps.py:make", "--page", "."], FILE, "it is a folder"),
    (["fit", "steps.py:raises"], TARGET, "ValueError: the data is not there"),
    (["fit", "steps.py:wrong"], TARGET, "returned int"),
    (["fit", "steps.py:short"], TARGET, "a tuple of 1"),
    (["fit", "steps.py:strange"], TARGET, "a dictionary with net"),
    (["fit", "steps.py:number"], USAGE, "has no function 'number'"),
    (["fit", "steps.py:missing"], USAGE, "make"),
    (["fit", "steps.py"], USAGE, "expected module:function, got"),
    (["fit", "nowhere.py:make"], USAGE, "there is no file 'nowhere.py'"),
    (["fit", "nowhere_at_all:make"], USAGE, "there is no module"),
    (["fit", "broken:make"], TARGET, "No module named 'no_such_thing'"),
    (["fit", "worse.py:make"], TARGET, "ZeroDivisionError"),
    (["fit", "steps.py:no_loss"], USAGE, "a loss of one element"),
    (["fit", "leaves.py:make"], TARGET, "leaves.py cannot be imported, it raised Sys"),
    (["fit", "steps.py:exits"], TARGET, "steps.py:exits raised SystemExit"),
    (["measure", "steps.py:exits", "--dry"], TARGET, "raised SystemExit"),
    (["fit", "steps.py:exits_in_forward"], TARGET, "steps.py:exits_in_forward raised"),
    (["fit", "steps.py:mismatched"], TARGET, "the step of steps.py:mismatched raised"),
    (["frontier", "steps.py:mismatched"], TARGET, "steps.py:mismatched raised"),
    (["table", "steps.py:mismatched"], TARGET, "steps.py:mismatched raised"),
    (["measure", "steps.py:mismatched", "--dry"], TARGET, "mismatched raised"),
    (["measure", "steps.py:divides"], TARGET, "raised ZeroDivisionError: division"),
    (["measure", "steps.py:bad_loss"], TARGET, "raised RuntimeError"),
    (["table", "steps.py:bad_loss"], TARGET, "raised RuntimeError"),
    (["measure", "steps.py:bad_shape"], TARGET, "raised RuntimeError"),
    (["measure", "steps.py:bad_norm"], TARGET, "raised RuntimeError"),
    (["measure", "steps.py:bad_backward"], TARGET, "raised ValueError: not written"),
    (["table", "steps.py:bad_backward"], TARGET, "raised ValueError: not written"),
    (["measure", "steps.py:bad_step"], TARGET, "raised IndexError: list index"),
    (["measure", "steps.py:no_model"], TARGET, "no_model returned str as its model"),
    (["fit", "steps.py:no_optimizer"], TARGET, "returned str as its optimizer"),
    (["measure", "steps.py:no_optimizer"], TARGET, "returned str as its optimizer"),
    (["measure", "steps.py:no_step"], TARGET, "returned int as its step"),
    (["measure", "steps.py:no_function"], TARGET, "returned str as its loss"),
    (["measure", "steps.py:no_batch"], TARGET, "neither a batch nor a step"),
    (["measure", "steps.py:make", "--dry", "--device", "abacus"], USAGE, "h100"),
    (["frontier", "steps.py:make", "--device", "h100"], USAGE, "--dry"),
    (["frontier", "steps.py:make", "--compile", "auto"], USAGE, "exact or inductor"),
    (
        ["frontier", "steps.py:make", "--compile", "exact", "--dry"],
        USAGE,
        "without --dry",
    ),
    (["measure", "steps.py:make", "--compile", "auto"], USAGE, "exact or inductor"),
    (["measure", "steps.py:make", "--compile", "exact", "--dry"], USAGE, "run here"),
    (
        ["measure", "steps.py:make", "--compile", "exact", "--budget", "1GiB"],
        USAGE,
        "without --dry, --budget",
    ),
    (["measure", "steps.py:looks", "--dry"], FAILED, "depend on tensor contents"),
    (["measure", "steps.py:raises", "--dry"], TARGET, "the data is not there"),
    (["measure", "steps.py:make", "--budget", "1KiB"], INFEASIBLE, "cannot be met"),
    (["compare", "steps.py:make", "--budget", "8 bananas"], USAGE, "bananas"),
    (["table", "steps.py:own_step"], USAGE, "not a step"),
    (["explain", "missing.json"], FILE, "cannot be read"),
    (["explain", "steps.py"], USAGE, "not a plan of recoup"),
    (["report", "steps.json", "--memory", "memory.jpg"], USAGE, ".svg or .png"),
    (["report", "missing.json"], FILE, "cannot be read"),
    (["explain", "hostile-plan.json"], USAGE, r"module is '\ud800'"),
    (["report", "hostile-findings.json"], USAGE, r"title is '\x1b[2J'"),
    (["frontier"], USAGE, "MODULE:FUNCTION"),
    (["nonsense"], USAGE, "nonsense"),
]


@pytest.mark.parametrize(("arguments", "status", "said"), WRONG)
def test_bad_input_prints_one_sentence(steps, capsys, arguments, status, said):
    assert run(arguments) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.startswith("recoup: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_a_step_that_exits_ends_the_comparison(steps, capsys):
    assert run(["compare", f"{steps}:exits_in_forward"]) == TARGET
    assert "exits_in_forward raised SystemExit" in capsys.readouterr().err


def test_errors_are_json_with_the_json_option(steps, capsys):
    assert run(["fit", f"{steps}:raises", "--json"]) == TARGET
    said = json.loads(capsys.readouterr().out)
    assert said["status"] == TARGET
    assert "the data is not there" in said["error"]


@pytest.mark.parametrize("function", ["raises", "exits", "divides"])
def test_a_traceback_is_shown_only_with_debug(steps, capsys, function):
    assert run(["fit", f"{steps}:{function}", "--debug"]) == TARGET
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert f"in {'<lambda>' if function == 'divides' else function}\n" in err


def test_an_error_of_recoup_is_reported_as_such(steps, capsys, monkeypatch):
    def fault(_: str) -> None:
        raise KeyError("inside")

    monkeypatch.setattr("recoup.cli.targets.load_target", fault)
    assert run(["fit", f"{steps}:make"]) == FAILED
    assert "may be the fault of recoup" in capsys.readouterr().err


@pytest.mark.parametrize("fault", [KeyError, AttributeError, AssertionError])
def test_an_error_of_recoup_during_a_step_is_reported_as_such(
    steps, capsys, monkeypatch, fault
):
    def record_call(*_: object) -> None:
        raise fault("inside")

    # As if raised in the recorder, which the operators of a step call.
    monkeypatch.setitem(
        record_call.__globals__, "__name__", "recoup.engine.recording.recorder"
    )
    monkeypatch.setattr("recoup.engine.recording.recorder.record_call", record_call)
    assert run(["fit", f"{steps}:make"]) == FAILED
    assert "may be the fault of recoup" in capsys.readouterr().err


def test_an_infeasible_budget_still_writes_the_page(steps, tmp_path, capsys):
    asked = ["fit", f"{steps}:named", "--budget", "5%", "--page", "why.html"]
    assert run(asked) == INFEASIBLE
    wrote, said = capsys.readouterr().err.splitlines()
    assert wrote == "wrote why.html"
    assert "a budget of 5% of the plain peak" in said
    assert "Does not fit" in (tmp_path / "why.html").read_text()


def test_a_failing_command_in_its_own_process(steps, tmp_path):
    done = recoup("fit", "steps.py:raises", "--page", "page.html", cwd=tmp_path)
    assert done.returncode == TARGET
    assert "the data is not there" in done.stderr
    assert not (tmp_path / "page.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["fit", "steps.py:slow", "--page", "page.html"],
        ["frontier", "steps.py:slow", "--chart", "chart.svg"],
        ["compare", "steps.py:slow"],
    ],
    ids=lambda command: command[0],
)
def test_an_interrupt_leaves_nothing_behind(tmp_path, command):
    slow = STEPS + (
        "\ndef slow():\n"
        "    model, batch, loss = make()\n"
        "    def step():\n"
        "        print('running', flush=True)\n"
        "        import time; time.sleep(0.2)\n"
        "        loss(model(batch)).backward()\n"
        "    return {'model': model, 'step': step}\n"
    )
    (tmp_path / "steps.py").write_text(slow)
    before = sorted(path.name for path in tmp_path.iterdir())
    process = subprocess.Popen(
        [sys.executable, "-c", ENTRY, *command],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Background jobs of a shell ignore interrupts by default.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert err.strip().splitlines()[-1] == "recoup: interrupted."
    assert sorted(path.name for path in tmp_path.iterdir()) == before

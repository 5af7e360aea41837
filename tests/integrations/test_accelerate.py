"""A loop that accelerate prepares: the same training, within the budget."""

# pyright: reportMissingImports=false

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import recoup
from recoup.backend.compiler.recognition import is_compiled
from recoup.backend.memory.meters import StorageMeter
from recoup.errors import UnsupportedError
from recoup.fitting.compiled_fit import CompiledFit
from tests.support.bits import tree_differences
from tests.support.processes import together
from tests.support.trainings import Rows, small_stack

pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from recoup.integrations.accelerate import fit_once

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("error::recoup.errors.BudgetWarning"),
]


def train(
    budget: float | int | None,
    *,
    save: Path | None = None,
    resume: Path | None = None,
    stop: int = 24,
    **settings: Any,
) -> dict[str, Any]:
    """Train one epoch, or the part of it before or after a saved state."""
    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()
    accelerator = Accelerator(cpu=True, **settings)
    model = small_stack()
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        DataLoader(Rows(), 64, shuffle=True, generator=torch.Generator()),
    )
    first = 0
    if resume is not None:
        accelerator.load_state(str(resume))
        first = 12
        loader = accelerator.skip_first_batches(loader, first)
    found: dict[str, Any] = {"losses": [], "peaks": [], "reports": []}
    for number, (inputs, targets) in enumerate(loader, start=first):
        if number == stop:
            break
        if budget is not None:
            found["reports"].append(
                fit_once(
                    accelerator,
                    model,
                    (inputs, targets),
                    budget,
                    loss=nn.functional.mse_loss,
                    optimizer=optimizer,
                )
            )
        with accelerator.accumulate(model):
            with StorageMeter("cpu") as meter:
                meter.track(model)
                for each in (inputs, targets, *(p.grad for p in model.parameters())):
                    if each is not None:
                        meter.track(each)
                for state in optimizer.state.values():
                    for value in state.values():
                        meter.track(value)
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
            found["peaks"].append(meter.peak_bytes)
            found["losses"].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    if save is not None:
        accelerator.save_state(str(save))
    found["state"] = dict(accelerator.unwrap_model(model).state_dict())
    return found


def test_a_loop_that_is_saved_and_resumed_is_bitwise_the_plain_one(tmp_path):
    settings = {"gradient_accumulation_steps": 2, "mixed_precision": "bf16"}
    plain = train(None, **settings)
    begun = train(0.8, save=tmp_path, stop=12, **settings)
    resumed = train(0.8, resume=tmp_path, **settings)
    assert begun["losses"] + resumed["losses"] == plain["losses"]
    states = plain["state"], resumed["state"]
    assert list(tree_differences(*states, where="")) == []
    report = begun["reports"][0]
    assert all(each is report for each in begun["reports"]), "it was fitted once"
    assert max(begun["peaks"]) <= report.budget_bytes < max(plain["peaks"])
    assert max(resumed["peaks"]) <= resumed["reports"][0].budget_bytes


def test_another_budget_fits_again_and_is_kept():
    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(small_stack(), DataLoader(Rows(64), 64))
    (batch,) = loader

    def fitted(budget: Any) -> Any:
        loss = nn.functional.mse_loss
        return fit_once(accelerator, model, batch, budget, loss=loss)

    def peak() -> int:
        with StorageMeter("cpu") as meter:
            meter.track(model)
            meter.track(batch[0])
            meter.track(batch[1])
            accelerator.backward(nn.functional.mse_loss(model(batch[0]), batch[1]))
        model.zero_grad()
        return meter.peak_bytes

    first = fitted("95%")
    assert first.measured_peak_bytes >= peak() > 0.8 * first.plain_peak_bytes
    second = fitted("80%")
    assert second is not first
    assert second is fitted("80%")
    assert peak() <= second.budget_bytes == int(0.8 * first.plain_peak_bytes)
    second.remove()


def test_an_optimizer_that_accelerate_wraps_reserves_what_it_will_take():
    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()
    model, found = small_stack(), []
    batch = tuple(map(torch.stack, zip(*Rows(64), strict=True)))
    optimizer = torch.optim.Adam(model.parameters())
    for each in (optimizer, Accelerator(cpu=True).prepare(optimizer)):
        _, report = recoup.fit(
            model, batch, 0.9, loss=nn.functional.mse_loss, optimizer=each
        )
        found.append(report.reserved_bytes)
        report.remove()
    assert found[0] == found[1] > 0


def test_a_model_compiled_by_accelerate_is_refused_without_compile():
    with pytest.raises(UnsupportedError, match="compile="):
        train(0.8, dynamo_backend="eager")


def test_the_blocks_of_a_model_compiled_by_accelerate_are_compiled_anew():
    found: list[Any] = []
    both: list[dict[str, Any]] = [{}, {"dynamo_backend": "eager"}]
    for settings in both:
        for shared in (AcceleratorState, GradientState, PartialState):
            shared._reset_state()
        accelerator = Accelerator(cpu=True, **settings)
        model = small_stack()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        model, optimizer, loader = accelerator.prepare(
            model, optimizer, DataLoader(Rows(), 64)
        )
        report, losses = None, []
        for inputs, targets in loader:
            if settings:
                report = fit_once(
                    accelerator,
                    model,
                    (inputs, targets),
                    0.9,
                    loss=nn.functional.mse_loss,
                    optimizer=optimizer,
                    compile="exact",
                )
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        found.append((losses, model.state_dict(), report, model))
    (expected, state, *_), (losses, ours, report, model) = found
    assert len(losses) >= 20
    assert losses == expected
    assert all(map(torch.equal, ours.values(), state.values()))
    assert isinstance(report, CompiledFit)
    assert report.measured_peak_bytes <= report.budget_bytes < report.plain_peak_bytes
    report.remove()
    assert is_compiled(model), "what accelerate compiled is there again"


def train_in_process(rank: int) -> Any:
    """Train without and with recoup; return losses, peaks and the plan."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", ACCELERATE_USE_CPU="true"
    )
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    plain = train(None, stop=22)
    # In its second step DDP replaces its buckets, and the meter sees the new ones only.
    del plain["peaks"][1]
    ours = train(int(0.85 * max(plain["peaks"])), stop=22)
    del ours["peaks"][1]
    report = ours["reports"][0]
    states = plain["state"], ours["state"]
    return {
        "differences": list(tree_differences(*states, where="")),
        "losses": (plain["losses"], ours["losses"]),
        "peaks": (max(ours["peaks"]), report.budget_bytes, max(plain["peaks"])),
        "plan": report.plan.to_json(),
    }


def test_two_processes_agree_and_train_bitwise_as_without_recoup(tmp_path):
    found = together(train_in_process, tmp_path, seconds=200)
    for each in found:
        assert each["differences"] == []
        assert each["losses"][0] == each["losses"][1]
        ours, budget, plain = each["peaks"]
        assert ours <= budget < plain
    assert found[0]["plan"] == found[1]["plan"]


LAUNCHED = """
import torch
from accelerate import Accelerator

from recoup.integrations.accelerate import fit_once
from tests.support.trainings import Rows, small_stack

accelerator = Accelerator(cpu=True)
model, loss = small_stack(), torch.nn.functional.mse_loss
loader = torch.utils.data.DataLoader(Rows(256), 64)
model, loader = accelerator.prepare(model, loader)
for inputs, targets in loader:
    report = fit_once(accelerator, model, (inputs, targets), loss=loss)
    accelerator.backward(loss(model(inputs), targets))
    model.zero_grad()
print(report.measured_peak_bytes, report.budget_bytes)
"""


@pytest.mark.slow
def test_a_launcher_sets_the_budget(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(LAUNCHED)
    root = Path(__file__).parents[2]
    launch = "accelerate.commands.launch --cpu --dynamo_backend no"
    counts = "--num_processes 1 --num_machines 1 --mixed_precision no"
    result = subprocess.run(
        [sys.executable, "-m", *f"{launch} {counts}".split(), str(program)],
        env={
            **os.environ,
            "RECOUP_BUDGET": "230KiB",
            "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    measured, budget = map(int, result.stdout.split())
    assert measured <= budget == 230 * 1024

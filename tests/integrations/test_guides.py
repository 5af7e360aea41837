"""The guides of the integrations: their diffs are short, run, and change no bit."""

# pyright: reportMissingImports=false

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.bits import tree_differences

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
MOST_ADDED = 3

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def versions_of(text: str, number: int = 0) -> tuple[str, str]:
    """Return the script of a guide's diff without its added lines, and with them."""
    diff = re.findall(r"```diff\n(.*?)```", text, flags=re.DOTALL)[number]
    lines = diff.splitlines()
    assert all(line[:1] in (" ", "+", "-", "") for line in lines)
    before = [line[1:] for line in lines if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    added = sum(line.startswith("+") for line in lines)
    assert 0 < added <= MOST_ADDED, f"{added} added lines"
    return "\n".join(before), "\n".join(after)


def run_both(
    guide: str, make: Any, words: Mapping[str, str] | None = None, number: int = 0
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The variables of a guide's script after it ran, without and with recoup."""
    found = []
    for script in versions_of((GUIDES / guide).read_text(encoding="utf-8"), number):
        for word, other in (words or {}).items():
            script = script.replace(word, other)
        variables = make()
        torch.manual_seed(3)
        exec(compile(script, guide, "exec"), variables)
        found.append(variables)
    return found[0], found[1]


def assert_same_model(one: Any, other: Any) -> None:
    pair = dict(one.state_dict()), dict(other.state_dict())
    assert list(tree_differences(*pair, where="")) == []


def test_the_guide_to_transformers(tmp_path):
    plain, ours = run_both("transformers.md", trainer_parts(tmp_path))
    assert_trained(plain["trainer"], ours["trainer"])


def test_the_tutorial_on_lora_with_the_trainer(tmp_path):
    pytest.importorskip("peft", reason="peft is not installed")
    plain, ours = run_both("../tutorials/lora.md", trainer_parts(tmp_path))
    assert_trained(plain["trainer"], ours["trainer"])


def trainer_parts(folder: Path) -> Any:
    """Return what makes the variables of a script with transformers' Trainer."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from transformers import TrainingArguments

    from tests.support.trainings import Tokens, tiny_llama

    def make() -> dict[str, Any]:
        arguments = TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=4,
            max_steps=3,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        model = tiny_llama()
        return {
            "model": model,
            "base": model,
            "arguments": arguments,
            "dataset": Tokens(),
        }

    return make


def assert_trained(plain: Any, ours: Any) -> None:
    """Two Trainers: the same parameters, the second within its budget, logged."""
    assert_same_model(plain.model, ours.model)
    (logged,) = [row for row in ours.state.log_history if "recoup_budget_bytes" in row]
    assert logged["recoup_measured_peak_bytes"] <= logged["recoup_budget_bytes"]
    assert logged["recoup_budget_bytes"] < logged["recoup_plain_peak_bytes"]


def loop_parts() -> dict[str, Any]:
    """Return the variables of a custom loop before it begins."""
    from tests.support.trainings import Rows, small_stack

    model = small_stack()
    return {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters()),
        "loader": torch.utils.data.DataLoader(Rows(256), 64, shuffle=True),
        "loss_function": torch.nn.functional.mse_loss,
    }


def test_the_guide_to_accelerate():
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def make() -> dict[str, Any]:
        for shared in (AcceleratorState, GradientState, PartialState):
            shared._reset_state()
        return loop_parts()

    # The share of the guide is for models with larger activations.
    plain, ours = run_both("accelerate.md", make, {'"60%"': '"80%"'})
    assert_same_model(plain["model"], ours["model"])


def test_the_guide_to_lightning(tmp_path, monkeypatch):
    pytest.importorskip("lightning", reason="lightning is not installed")
    import lightning

    from tests.support.trainings import Rows, small_stack

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = small_stack()

        def training_step(self, batch: Any) -> Any:
            return torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    def make() -> dict[str, Any]:
        loader = torch.utils.data.DataLoader(Rows(256), 64, shuffle=True)
        return {"module": Module(), "loader": loader, "steps": 4}

    monkeypatch.chdir(tmp_path)
    plain, ours = run_both("lightning.md", make)
    assert_same_model(plain["module"], ours["module"])


def test_the_guide_to_fabric():
    pytest.importorskip("lightning", reason="lightning is not installed")

    plain, ours = run_both("lightning.md", loop_parts, number=1)
    assert_same_model(plain["model"], ours["model"])


@pytest.mark.parametrize("count", [0, MOST_ADDED + 1])
def test_a_diff_that_is_too_long_is_detected(count):
    text = "```diff\n" + "+x = 1\n" * count + " y = 2\n```\n"
    with pytest.raises(AssertionError, match="added lines"):
        versions_of(text)

"""TRL's trainers and quantised base models: the same training, within the budget."""

# pyright: reportMissingImports=false

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.bits import tree_differences
from tests.support.processes import together
from tests.support.trainings import Tokens, tiny_llama

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from transformers import TrainingArguments

from recoup.integrations.transformers import RecoupCallback
from tests.integrations.test_transformers import (
    MeteredTrainer,
    Stop,
    assert_nothing_is_left,
    collate,
    join,
    losses,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("error::recoup.errors.BudgetWarning"),
]

STEPS = 20


def settings(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "use_cpu": True,
        "bf16": True,
        "report_to": [],
        "save_strategy": "steps",
        "save_steps": 12,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "seed": 5,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


Make = Callable[[Path, list[Any]], Any]
"""Makes a Trainer from its folder and its callbacks."""


def interrupted(make: Make, folder: Path, budget: Any = None) -> Any:
    """Train until step 12 and, with new objects, from its checkpoint to the end."""
    found: list[Any] = []
    for stop in (12, None):
        callbacks: list[Any] = [] if budget is None else [RecoupCallback(budget)]
        ends = [] if stop is None else [Stop(stop)]
        trainer = make(folder, [*callbacks, *ends])
        trainer.peaks = []
        trainer.train(resume_from_checkpoint=None if stop else True)
        trainer.report = callbacks[0].report if callbacks else None
        found.append(trainer)
    assert [len(each.peaks) for each in found] == [24, 2 * (STEPS - 12)]
    return found


def trained(trainer: Any) -> dict[str, torch.Tensor]:
    parameters = trainer.model.named_parameters()
    return {name: each for name, each in parameters if each.requires_grad}


def assert_same_and_within(make: Make, folder: Path, budget: Any) -> None:
    """Train and resume with and without recoup, and compare."""
    plain = interrupted(make, folder / "plain")
    ours = interrupted(make, folder / "ours", budget)
    for one, other in zip(plain, ours, strict=True):
        assert logged(one) == logged(other)
        states = trained(one), trained(other)
        assert states[0]
        assert list(tree_differences(*states, where="")) == []
        assert max(other.peaks) <= other.report.budget_bytes < max(one.peaks)
        assert_nothing_is_left(other, one)
    assert len(losses(ours[1])) == STEPS


def logged(trainer: Any) -> list[dict[str, Any]]:
    """Return the log without times and entries of recoup."""
    times = ("runtime", "per_second")
    return [
        {name: value for name, value in row.items() if not name.endswith(times)}
        for row in trainer.state.log_history
        if "recoup_budget_bytes" not in row
    ]


def sentence(start: int, factor: int, count: int) -> str:
    return " ".join(f"w{(start * factor + k * k) % 60}" for k in range(count))


SENTENCES = [{"text": sentence(row, 7, 47)} for row in range(96)]
PAIRS = [
    {
        "prompt": sentence(row, 7, 12),
        "chosen": " " + sentence(row, 5, 22),
        "rejected": " " + sentence(row, 3, 19),
    }
    for row in range(96)
]


def words_of(count: int) -> Any:
    """Return a tokenizer of `w0`, `w1`, ... that needs no file."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    words = {f"w{number}": number for number in range(count)}
    words |= {word: count + number for number, word in enumerate(special.values())}
    model = tokenizers.models.WordLevel(words, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


TRAININGS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "fine-tuning": ("SFT", SENTENCES, {}),
    "packed": ("SFT", SENTENCES, {"packing": True, "packing_strategy": "wrapped"}),
    "preferences": ("DPO", PAIRS, {}),
}


def maker_of(training: str) -> Make:
    """Return what makes a trainer of TRL, metered."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    name, rows, options = TRAININGS[training]
    metered = type("Metered", (MeteredTrainer, getattr(trl, f"{name}Trainer")), {})

    def make(folder: Path, callbacks: list[Any]) -> Any:
        # DPO would load the model that it compares with from a hub.
        compared: dict[str, Any] = {"ref_model": tiny_llama()} if name == "DPO" else {}
        configuration = getattr(trl, f"{name}Config")(
            **settings(folder), **options, max_length=48, gradient_checkpointing=False
        )
        return metered(
            model=tiny_llama(),
            **compared,
            args=configuration,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=words_of(60),
            callbacks=callbacks,
        )

    return make


@pytest.mark.parametrize("training", TRAININGS)
def test_trl_trains_saves_resumes_and_logs_as_without_recoup(tmp_path, training):
    make = maker_of(training)
    # TRL's head computes the loss in a workspace of 24 MB, most of this small step.
    assert_same_and_within(make, tmp_path, 0.97)


def train_in_process(rank: int, folder: str) -> Any:
    """Train without and with the callback; return what differs."""
    join(rank)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    make = maker_of("fine-tuning")
    plain = interrupted(make, Path(folder, "plain"))
    budget = int(0.97 * max(plain[1].peaks))
    ours = interrupted(make, Path(folder, "ours"), budget)
    pairs = zip(plain, ours, strict=True)
    return {
        "differences": [
            list(tree_differences(trained(one), trained(other), where=""))
            for one, other in pairs
        ],
        "losses": (losses(plain[1]), losses(ours[1])),
        "peaks": (max(ours[0].peaks + ours[1].peaks), budget, max(plain[1].peaks)),
        "plan": ours[1].report.plan.to_json(),
    }


def test_two_processes_of_trl_train_save_and_resume_as_without_recoup(tmp_path):
    pytest.importorskip("trl", reason="trl is not installed")
    found = together(train_in_process, tmp_path, str(tmp_path), seconds=400)
    for each in found:
        assert isinstance(each, dict), each
        assert each["differences"] == [[], []]
        assert each["losses"][0] == each["losses"][1]
        ours, budget, plain = each["peaks"]
        assert ours <= budget < plain
    assert found[0]["plan"] == found[1]["plan"]


def by_torchao() -> nn.Module:
    """Return a Llama whose layers have weights of 8 bits."""
    quantization = pytest.importorskip("torchao.quantization")
    base = tiny_llama()
    quantization.quantize_(
        base,
        quantization.Int8WeightOnlyConfig(),
        filter_fn=lambda module, path: (
            isinstance(module, nn.Linear) and "layers" in path
        ),
    )
    return base


def by_bitsandbytes() -> nn.Module:
    """Return a Llama whose layers have weights of 4 bits."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    base = tiny_llama()
    for path, module in list(base.named_modules()):
        if isinstance(module, nn.Linear) and "layers" in path:
            parent, _, name = path.rpartition(".")
            quantised = bitsandbytes.nn.Linear4bit(
                module.in_features,
                module.out_features,
                bias=False,
                compute_dtype=torch.float32,
                quant_type="nf4",
            )
            quantised.load_state_dict(module.state_dict())
            setattr(base.get_submodule(parent), name, quantised.to("cpu"))
    return base


@pytest.mark.parametrize("make", [by_torchao, by_bitsandbytes])
def test_adapters_of_a_quantised_base_train_save_and_resume_as_without_recoup(
    tmp_path, make
):
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def make_trainer(folder: Path, callbacks: list[Any]) -> Any:
        base: Any = make()
        torch.manual_seed(3)
        model = peft.get_peft_model(
            base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        )
        return MeteredTrainer(
            model=model,
            args=TrainingArguments(**settings(folder)),
            train_dataset=Tokens(),
            data_collator=collate,
            callbacks=callbacks,
        )

    assert_same_and_within(make_trainer, tmp_path, 0.8)

"""TRL's trainers and quantised base models: the same training, within the budget."""

# pyright: reportMissingImports=false

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.bits import tree_differences
from tests.support.trainings import tiny_llama

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from recoup.integrations.transformers import RecoupCallback

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
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "seed": 5,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def assert_same_and_within(ours: Any, plain: Any, callback: RecoupCallback) -> None:
    losses = [
        [row["loss"] for row in each.state.log_history if "loss" in row]
        for each in (plain, ours)
    ]
    assert len(losses[0]) == STEPS
    assert losses[0] == losses[1]
    states = [
        {
            name: parameter
            for name, parameter in each.model.named_parameters()
            if parameter.requires_grad
        }
        for each in (plain, ours)
    ]
    assert states[0]
    assert list(tree_differences(*states, where="")) == []
    report: Any = callback.report
    assert report.measured_peak_bytes <= report.budget_bytes < report.plain_peak_bytes


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


def logged(trainer: Any) -> list[dict[str, Any]]:
    """Return the log without times and entries of recoup."""
    times = ("runtime", "per_second")
    rows = [
        {name: value for name, value in row.items() if not name.endswith(times)}
        for row in trainer.state.log_history
        if "recoup_budget_bytes" not in row
    ]
    assert "num_tokens" in rows[0], "TRL counts in its steps"
    return rows


@pytest.mark.parametrize(
    ("name", "rows"),
    [("SFT", SENTENCES), ("DPO", PAIRS)],
    ids=["fine-tuning", "preferences"],
)
def test_trl_trains_and_logs_as_without_recoup(tmp_path, name, rows):
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(60)}
    words |= {"<pad>": 60, "<eos>": 61, "<unk>": 62}
    model = tokenizers.models.WordLevel(words, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    # DPO would load the model that it compares with from a hub.
    compared = {"DPO": {"ref_model": tiny_llama()}}.get(name, {})

    def train(callback: RecoupCallback | None) -> Any:
        trainer = getattr(trl, f"{name}Trainer")(
            model=tiny_llama(),
            **compared,
            args=getattr(trl, f"{name}Config")(
                **settings(tmp_path), max_length=48, gradient_checkpointing=False
            ),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=tokenizer,
                pad_token="<pad>",
                eos_token="<eos>",
                unk_token="<unk>",
            ),
            callbacks=[] if callback is None else [callback],
        )
        trainer.train()
        return trainer

    # TRL's head computes the loss in a workspace of 24 MB, most of this small step.
    callback = RecoupCallback(0.97)
    ours, plain = train(callback), train(None)
    assert_same_and_within(ours, plain, callback)
    assert logged(ours) == logged(plain)


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
def test_adapters_of_a_quantised_base_are_trained_as_without_recoup(tmp_path, make):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import Trainer, TrainingArguments

    from tests.integrations.test_transformers import collate
    from tests.support.trainings import Tokens

    def train(callback: RecoupCallback | None) -> Any:
        base: Any = make()
        torch.manual_seed(3)
        model = peft.get_peft_model(
            base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        )
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**settings(tmp_path)),
            train_dataset=Tokens(),
            data_collator=collate,
            callbacks=[] if callback is None else [callback],
        )
        trainer.train()
        return trainer

    callback = RecoupCallback(0.8)
    assert_same_and_within(train(callback), train(None), callback)

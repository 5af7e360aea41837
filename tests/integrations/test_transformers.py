"""The callback for transformers' Trainer: the same training, within the budget."""

# pyright: reportMissingImports=false

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from recoup.backend.memory.meters import StorageMeter
from recoup.errors import InfeasibleError, UsageError
from recoup.fitting.compiled_fit import CompiledFit
from recoup.fitting.fit import Fit
from recoup.integrations import first_step
from recoup.train.budgeting.process_budget import UnitPlan, fit_together
from tests.support.bits import tree_differences
from tests.support.processes import together
from tests.support.trainings import Tokens, tiny_llama

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate import DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import (
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from recoup.integrations.transformers import RecoupCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("error::recoup.errors.BudgetWarning"),
]

STEPS = 20


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


class MeteredTrainer(Trainer):
    """Measures every training step."""

    peaks: list[int]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        own: Any = self.model
        optimizer: Any = self.optimizer
        with StorageMeter("cpu") as meter:
            meter.track(own)
            for group in (own.parameters(), optimizer.state.values()):
                for each in group:
                    found = [each.grad] if isinstance(each, nn.Parameter) else each
                    for tensor in found.values() if isinstance(found, dict) else found:
                        if isinstance(tensor, torch.Tensor):
                            meter.track(tensor)
            for tensor in inputs.values():
                meter.track(tensor)
            loss = super().training_step(model, inputs, *args, **kwargs)
        self.peaks.append(meter.peak_bytes)
        return loss


class Stop(TrainerCallback):
    """Ends a run in the middle, like an interrupt."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def train(
    folder: Path,
    callback: RecoupCallback | None = None,
    *,
    resume: bool | str = False,
    stop: int | None = None,
    kind: type[Any] = MeteredTrainer,
    make: Callable[[], nn.Module] = tiny_llama,
    **settings: Any,
) -> Any:
    callbacks: list[Any] = [] if callback is None else [callback]
    callbacks += [] if stop is None else [Stop(stop)]
    trainer = made(callbacks, folder, kind, make, **settings)
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def made(
    callbacks: list[Any],
    folder: Path,
    kind: type[Any] = MeteredTrainer,
    make: Callable[[], nn.Module] = tiny_llama,
    **settings: Any,
) -> Any:
    """Return a Trainer that has not trained yet."""
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "seed": 5,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "log_level": "error",
        **settings,
    }
    trainer = kind(
        model=make(),
        args=TrainingArguments(**options),
        train_dataset=Tokens(),
        eval_dataset=torch.utils.data.Subset(Tokens(), range(8)),
        data_collator=collate,
        callbacks=callbacks,
    )
    trainer.peaks = []
    return trainer


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def assert_same_run(trainer: Any, plain: Any) -> None:
    assert losses(trainer) == losses(plain)
    found = {**trainer.model.state_dict()}
    expected = {**plain.model.state_dict()}
    assert list(tree_differences(expected, found, where="")) == []


def hook_counts(trainer: Any) -> list[tuple[int, int]]:
    return [
        (len(module._forward_hooks), len(module._forward_pre_hooks))
        for module in trainer.model.modules()
    ]


def assert_nothing_is_left(trainer: Any, plain: Any = None) -> None:
    """Check that the plan is removed, and the Trainer calls its own step.

    With gradient checkpointing transformers has a hook of its own: as `plain` has.
    """
    assert "training_step" not in vars(trainer)
    found = hook_counts(trainer)
    assert found == (hook_counts(plain) if plain else [(0, 0)] * len(found))


EVERYTHING = {
    "gradient_accumulation_steps": 2,
    "bf16": True,
    "label_smoothing_factor": 0.1,
    "neftune_noise_alpha": 5.0,
}


def check_run(folder: Path, settings: dict[str, Any], budget: float = 0.7) -> None:
    """Train with and without the callback, and compare."""
    plain = train(folder, **settings)
    callback = RecoupCallback(budget)
    trainer = train(folder, callback, **settings)
    report = callback.report
    assert report is not None
    assert len(trainer.peaks) == len(plain.peaks), "rehearsals leave no trace"
    assert max(trainer.peaks) <= report.budget_bytes
    if "gradient_checkpointing" not in settings:
        assert max(plain.peaks) > report.budget_bytes
    assert_same_run(trainer, plain)
    assert_nothing_is_left(trainer, plain)


def lora() -> nn.Module:
    """A frozen Llama with small trained parts."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base: Any = tiny_llama()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(base, config)


@pytest.mark.parametrize(("make", "share"), [(tiny_llama, 0.7), (lora, 0.8)])
def test_a_run_that_saves_evaluates_and_resumes_is_bitwise_the_plain_one(
    tmp_path, make, share
):
    settings: dict[str, Any] = {
        **EVERYTHING,
        "make": make,
        "save_strategy": "steps",
        "save_steps": 12,
        "eval_strategy": "steps",
        "eval_steps": 7,
        "save_total_limit": 1,
    }
    plain = train(tmp_path / "plain", **settings)
    callback = RecoupCallback(share)
    begun = train(tmp_path / "ours", callback, stop=12, **settings)
    assert len(begun.peaks) == 24, "rehearsals leave no trace"
    assert_nothing_is_left(begun)
    saved = tmp_path / "ours" / "checkpoint-12" / "trainer_state.json"
    state = json.loads(saved.read_text())["stateful_callbacks"]["RecoupCallback"]
    assert state["args"] == {
        "budget": share,
        "compile": None,
        "allow": ["keep"],
        "slowdown": None,
        "rerun": None,
    }
    report = callback.report
    assert report is not None
    numbers = state["attributes"]["_numbers"]
    assert numbers["recoup_budget_bytes"] == report.budget_bytes
    resumed = train(tmp_path / "ours", RecoupCallback(share), resume=True, **settings)
    assert len(resumed.peaks) == 2 * (STEPS - 12)
    assert max(begun.peaks + resumed.peaks) <= report.budget_bytes < max(plain.peaks)
    assert_same_run(resumed, plain)
    evaluated = [
        [row["eval_loss"] for row in each.state.log_history if "eval_loss" in row]
        for each in (plain, resumed)
    ]
    assert evaluated[0] == evaluated[1]
    logged = [row for row in resumed.state.log_history if "recoup_budget_bytes" in row]
    assert [row["step"] for row in logged] == [0, 12], "once for each start"


def test_a_callback_that_the_trainer_restores_has_the_budget_of_the_checkpoint(
    tmp_path,
):
    settings: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps"}
    begun = train(tmp_path, given := RecoupCallback(0.7), save_steps=2, **settings)
    resumed = train(
        tmp_path,
        RecoupCallback(0.9),
        resume=str(tmp_path / "checkpoint-2"),
        restore_callback_states_from_checkpoint=True,
        **settings,
    )
    (restored,) = [
        each
        for each in resumed.callback_handler.callbacks
        if isinstance(each, RecoupCallback)
    ]
    assert restored.state()["args"] == given.state()["args"]
    assert restored.report is not None
    assert_same_run(resumed, begun)
    assert_nothing_is_left(resumed)


def test_an_infeasible_budget_makes_the_batch_smaller(tmp_path):
    settings: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": 2}
    with pytest.raises(InfeasibleError) as caught:
        train(tmp_path, RecoupCallback(1 << 19), **settings)
    floor = caught.value.floor_bytes
    callback = RecoupCallback(floor - 1)
    trainer = train(tmp_path, callback, auto_find_batch_size=True, **settings)
    assert callback.largest_batch is not None
    assert trainer._train_batch_size == callback.largest_batch.size == 1
    assert max(trainer.peaks) < floor
    assert_nothing_is_left(trainer)


class Ragged(Tokens):
    """Sentences of 16 to 48 tokens."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = 16 + index * 13 % 33
        return {name: row[:length] for name, row in super().__getitem__(index).items()}


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["labels"]) for row in rows)
    blanks = {"input_ids": 0, "labels": -100}
    return {
        name: torch.tensor(
            [row[name] + [blank] * (longest - len(row[name])) for row in rows]
        )
        for name, blank in blanks.items()
    }


class OwnLoss(MeteredTrainer):
    """Divides the loss by the tokens of all accumulated batches, and logs it."""

    divisors: list[int]

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,  # noqa: FBT001, FBT002 (the Trainer's)
        num_items_in_batch: Any = None,
    ) -> Any:
        labels = inputs.pop("labels")
        output = model(**inputs)
        loss = nn.functional.cross_entropy(
            output.logits[:, :-1].flatten(0, 1),
            labels[:, 1:].flatten(),
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        if num_items_in_batch is not None:
            self.divisors.append(int(num_items_in_batch))
            loss = loss / num_items_in_batch
        if model.training:
            self.log({"own": loss.item()})
        return (loss, output) if return_outputs else loss


class ToAFile(TrainerCallback):
    """Sends what is logged where no library can take it back."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self._file.open("a") as file:
            file.write(f"{kwargs['logs'].get('own')}\n")


def test_a_loss_function_of_the_user_is_counted_and_logged_as_without_recoup(tmp_path):
    found = []
    for callback in (None, RecoupCallback(0.75)):
        file = tmp_path / f"{len(found)}.log"
        trainer = made(
            [ToAFile(file), *([callback] if callback else [])],
            tmp_path,
            OwnLoss,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=10,
        )
        trainer.train_dataset, trainer.data_collator = Ragged(), padded
        trainer.divisors = []
        trainer.train()
        own = [line for line in file.read_text().splitlines() if line != "None"]
        found.append((trainer, callback, own))
    (plain, _, expected), (ours, callback, logged) = found
    assert callback is not None
    assert callback.report is not None
    assert len(logged) == 2 * STEPS
    assert logged == expected, "rehearsals leave no trace"
    assert ours.divisors == plain.divisors
    assert len({*ours.divisors}) > 1
    assert_same_run(ours, plain)
    assert max(ours.peaks) <= callback.report.budget_bytes < max(plain.peaks)
    assert_nothing_is_left(ours)
    assert "log" not in vars(ours)


@pytest.mark.sweep
@pytest.mark.parametrize("slowdown", [None, 100.0])
def test_a_batch_that_does_not_fit_becomes_the_largest_that_does(
    tmp_path, monkeypatch, slowdown
):
    fits = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        fits.append(1)
        return fit_together(*args, **kwargs)

    monkeypatch.setattr(first_step, "fit_together", counted)
    # Accelerate tries 12, 10, 9, 8, 7, ...
    settings: dict[str, Any] = {"per_device_train_batch_size": 12, "max_steps": 1}
    budget = 1_400_000
    callback = RecoupCallback(budget, slowdown=slowdown)
    trainer = train(tmp_path, callback, auto_find_batch_size=True, **settings)
    largest = callback.largest_batch
    assert largest is not None
    tried = [12, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    expected = next(size for size in tried if size <= largest.size)
    assert trainer._train_batch_size == expected < 9
    # Only the sizes that train, and the first one if it had to be tried.
    assert len(fits) == (2 if slowdown is None else 1)
    assert max(trainer.peaks) <= budget
    logged = [row.get("recoup_largest_batch") for row in trainer.state.log_history]
    assert largest.size in logged
    assert_nothing_is_left(trainer)


def test_a_largest_batch_needs_a_budget_in_bytes():
    with pytest.raises(UsageError, match="bytes"):
        RecoupCallback(0.5, slowdown=0.3)
    with pytest.raises(UsageError, match="slowdown"):
        RecoupCallback("1GiB", slowdown=-1)


def test_a_compiled_run_is_planned_by_the_compiled_blocks(tmp_path):
    plain = train(tmp_path)
    callback = RecoupCallback(0.7, compile="exact")
    trainer = train(
        tmp_path,
        callback,
        kind=Trainer,  # a compiler cannot trace a meter
        torch_compile=True,
        torch_compile_backend="eager",
    )
    report = callback.report
    assert isinstance(report, CompiledFit)
    assert report.measured_peak_bytes <= report.budget_bytes
    assert_same_run(trainer, plain)
    assert_nothing_is_left(trainer)


def test_lora_with_compiled_blocks_trains_bitwise_as_without_recoup(tmp_path):
    plain = train(tmp_path, make=lora)
    callback = RecoupCallback(0.8, compile="exact")
    # A compiler cannot trace a meter.
    trainer = train(tmp_path, callback, kind=Trainer, make=lora)
    report = callback.report
    assert isinstance(report, CompiledFit)
    assert len(report.numbers()["compiled"]) == 2
    assert report.difference == 0.0
    assert report.measured_peak_bytes <= report.budget_bytes < report.plain_peak_bytes
    assert len(losses(trainer)) == STEPS
    assert_same_run(trainer, plain)
    assert_nothing_is_left(trainer)


def test_the_largest_batch_is_checked_by_the_compiled_blocks(tmp_path):
    settings: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": 4}
    plain = train(tmp_path, **settings)
    callback = RecoupCallback(1_400_000, compile="exact", slowdown=0.0)
    trainer = train(tmp_path, callback, kind=Trainer, **settings)
    largest = callback.largest_batch
    assert largest is not None
    assert largest.executor == "exact"
    assert largest.size >= largest.plain_size > 1
    assert largest.measured_peak_bytes <= largest.budget_bytes == 1_400_000
    assert isinstance(callback.report, CompiledFit)
    assert_same_run(trainer, plain)
    assert_nothing_is_left(trainer)


def test_training_twice_evaluating_and_predicting_equals_the_plain_run(tmp_path):
    callback = RecoupCallback(0.7)
    found = []
    for callbacks in ([], [callback]):
        trainer = made(callbacks, tmp_path, max_steps=4)
        numbers = [trainer.evaluate()["eval_loss"]]
        assert callback.report is None
        for _ in range(2):
            trainer.train()
            numbers += losses(trainer)
            numbers.append(trainer.evaluate()["eval_loss"])
            numbers.append(trainer.predict(trainer.eval_dataset).metrics["test_loss"])
        found.append((trainer, numbers))
    (plain, expected), (ours, numbers) = found
    assert numbers == expected
    assert_same_run(ours, plain)
    assert_nothing_is_left(ours)
    report: Any = callback.report
    assert max(ours.peaks) <= report.budget_bytes < max(plain.peaks)
    # Another Trainer with the same callback.
    other = train(tmp_path, callback, max_steps=4)
    assert callback.report is not report
    assert_same_run(other, train(tmp_path, max_steps=4))


def test_a_step_set_on_one_trainer_instance_is_planned(tmp_path):
    trainer = made([callback := RecoupCallback(0.7)], tmp_path, max_steps=4)
    of_the_class = trainer.training_step

    class Counted:
        calls = 0

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return of_the_class(*args, **kwargs)

    step = trainer.training_step = Counted()
    trainer.train()
    assert step.calls == 4, "rehearsals leave no trace"
    assert vars(trainer)["training_step"] is step
    assert callback.report is not None
    del trainer.training_step
    assert_nothing_is_left(trainer)


def test_two_callbacks_in_one_trainer_are_refused(tmp_path):
    trainer = made([RecoupCallback(0.7), RecoupCallback(0.9)], tmp_path, max_steps=4)
    with pytest.raises(UsageError, match="one RecoupCallback"):
        trainer.train()


class FailingTrainer(MeteredTrainer):
    """Fails in its third step."""

    is_failing = True

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_failing and self.state.global_step == 2:
            raise ZeroDivisionError
        return super().training_step(*args, **kwargs)


def test_an_error_in_a_step_leaves_no_plan_and_no_old_report(tmp_path):
    callback = RecoupCallback(0.7)
    trainer = made([callback], tmp_path, FailingTrainer, max_steps=4)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert callback.report is not None
    assert_nothing_is_left(trainer)
    trainer.is_failing = False
    trainer.train()
    assert len(trainer.peaks) == 2 + 4
    callback._first.budget = 1 << 19
    with pytest.raises(InfeasibleError):
        trainer.train()
    assert callback.report is None, "not that of the training before"
    assert_nothing_is_left(trainer)


def test_a_budget_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("RECOUP_BUDGET", "3MiB")
    assert RecoupCallback().state()["args"]["budget"] == "3MiB"
    assert RecoupCallback(0.5).state()["args"]["budget"] == 0.5
    monkeypatch.setenv("RECOUP_BUDGET", "much")
    with pytest.raises(UsageError, match="much"):
        RecoupCallback()


def test_the_callback_names_its_required_caller():
    callback = RecoupCallback(0.5)
    with pytest.raises(UsageError, match="Trainer"):
        callback.on_train_begin(None, None, None)


def join(rank: int) -> None:
    """Make a process one of two that transformers trains with."""
    for name, value in (
        ("RANK", rank),
        ("LOCAL_RANK", rank),
        ("WORLD_SIZE", 2),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", 29500),
    ):
        os.environ[name] = str(value)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def train_in_process(rank: int, folder: str, name: str) -> Any:
    """Train plainly, and in two runs with the callback; return what they show."""
    join(rank)
    settings: dict[str, Any] = {
        "make": lora if name == "lora" else tiny_llama,
        "ddp_backend": "gloo",
        "gradient_accumulation_steps": 2,
        "bf16": True,
        "save_steps": 12,
    }
    plain = train(Path(folder, "plain"), **settings)
    budget = int(0.8 * max(plain.peaks))
    settings["save_strategy"] = "steps"
    first, second = RecoupCallback(budget), RecoupCallback(budget)
    begun = train(Path(folder, "ours"), first, stop=12, **settings)
    resumed = train(Path(folder, "ours"), second, resume=True, **settings)
    assert isinstance(first.report, Fit)
    assert isinstance(second.report, Fit)
    states = dict(plain.model.state_dict()), dict(resumed.model.state_dict())
    return {
        "steps": (len(begun.peaks), len(resumed.peaks)),
        "differences": list(tree_differences(*states, where="")),
        "peaks": (max(begun.peaks + resumed.peaks), budget, max(plain.peaks)),
        "plans": [first.report.plan.to_json(), second.report.plan.to_json()],
    }


@pytest.mark.parametrize("name", ["full", "lora"])
def test_two_processes_agree_save_and_resume_bitwise_as_without_recoup(tmp_path, name):
    if name == "lora":
        pytest.importorskip("peft", reason="peft is not installed")
    found = together(train_in_process, tmp_path, str(tmp_path), name, seconds=300)
    for each in found:
        assert each["steps"] == (24, 2 * (STEPS - 12))
        assert each["differences"] == []
        ours, budget, plain = each["peaks"]
        assert ours <= budget < plain
    assert found[0]["plans"] == found[1]["plans"]


class ShardedTrainer(MeteredTrainer):
    """Shards the model by accelerate's FSDP2, in processes without accelerators.

    accelerate uses its plugin on accelerators only: on CPUs it replicates the model
    with DistributedDataParallel instead, and says nothing.
    """

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state: Any = self.accelerator.state
        options: dict[str, Any] = dict(self.args.fsdp_plugin_args or {})
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**options)
        state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.is_fsdp_enabled = True


def shards(trainer: Any) -> dict[str, torch.Tensor]:
    """Return this process's part of each tensor of a sharded model."""
    state = trainer.model.state_dict()
    return {
        name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for name, tensor in state.items()
    }


def train_sharded(rank: int, folder: str) -> Any:
    """Train with FSDP without and with the callback; return what differs."""
    join(rank)
    settings: dict[str, Any] = {
        "kind": ShardedTrainer,
        "fsdp": True,
        "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        "ddp_backend": "gloo",
        # accelerate exchanges gradients in the second batch of a step only.
        "gradient_accumulation_steps": 2,
    }
    plain = train(Path(folder), **settings)
    callback = RecoupCallback(int(0.9 * max(plain.peaks)))
    ours = train(Path(folder), callback, **settings)
    report = callback.report
    assert isinstance(report, UnitPlan)
    assert all(isinstance(p, DTensor) for p in ours.model.parameters())
    assert_nothing_is_left(ours, plain)
    return {
        "differences": list(tree_differences(shards(plain), shards(ours), where="")),
        "losses": (losses(plain), losses(ours)),
        "steps": (len(plain.peaks), len(ours.peaks)),
        "peaks": (max(ours.peaks), report.budget_bytes, max(plain.peaks)),
        "plan": report.plan,
    }


def test_two_processes_that_shard_the_model_train_bitwise_as_without_recoup(tmp_path):
    found = together(train_sharded, tmp_path, str(tmp_path), seconds=200)
    for each in found:
        assert isinstance(each, dict), each
        assert each["differences"] == []
        assert each["losses"][0] == each["losses"][1]
        assert each["steps"] == (2 * STEPS, 2 * STEPS), "rehearsals leave no trace"
        ours, budget, plain = each["peaks"]
        assert ours <= budget < plain
        assert {"recompute", "keep costly"} & {*each["plan"]}
    assert found[0]["plan"] == found[1]["plan"]

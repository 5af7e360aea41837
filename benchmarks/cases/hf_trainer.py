"""Fine-tuning with transformers' Trainer: the callback against the Trainer's switches.

Llama with 1.1 billion parameters, and LoRA on one with 7 billion, from configuration
with random weights. For each: plain, `gradient_checkpointing=True`, the same with
`torch_compile=True`, and `RecoupCallback` at the peak of the first of these two and at
shares of the plain peak, eager and compiled. Tokens per second are those of the steps
after the warm-up, the peak is that of the same steps.
"""

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.cases.hugging_face import CASES, run_models
from benchmarks.harness import Row, synchronize
from recoup.integrations.transformers import RecoupCallback

os.environ.setdefault("HF_HUB_OFFLINE", "1")

MODELS = {"llama-1.1b": "llama", "lora-7b": "lora"}
WARMUP = 4
"""Steps that are not measured: the compiler and the callback work in the first."""


class Repeated(torch.utils.data.Dataset[Any]):
    """One sentence, as often as it is asked for."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens, "labels": self._tokens}


class Clock(TrainerCallback):
    """Measures time and peak of the steps after the warm-up."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds, self.peak, self.steps = 0.0, 0, 0
        self._begun = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control, kwargs
        if state.global_step == WARMUP:
            gc.collect()
            synchronize(self.device)
            if self.device.type != "cpu":
                torch.accelerator.reset_peak_memory_stats()
            self._begun = time.perf_counter()
        elif state.global_step == state.max_steps:
            synchronize(self.device)
            self.seconds = time.perf_counter() - self._begun
            self.steps = state.global_step - WARMUP
            if self.device.type != "cpu":
                self.peak = torch.accelerator.max_memory_allocated()


def trained(
    name: str,
    device: torch.device,
    steps: int,
    callback: RecoupCallback | None,
    **settings: Any,
) -> dict[str, Any]:
    """Train a new model; return tokens per second, peak and time of a step."""
    large = device.type != "cpu"
    torch.manual_seed(0)
    case = CASES[MODELS[name]](large=large)
    rows, length = case.batch["input_ids"].shape
    model: nn.Module = case.model.to(device, torch.bfloat16 if large else torch.float32)
    clock = Clock(device)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=rows,
            max_steps=WARMUP + steps,
            use_cpu=not large,
            optim="adamw_torch_fused" if large else "adamw_torch",
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **settings,
        )
        callbacks = [clock, *([callback] if callback else [])]
        Trainer(
            model=model,
            args=arguments,
            train_dataset=Repeated(case.batch["input_ids"][0].cpu()),
            callbacks=callbacks,
        ).train()
    seconds = clock.seconds / clock.steps
    return {
        "tokens/s": round(rows * length / seconds),
        "peak GiB": round(clock.peak / 2**30, 3),
        "ms": round(1e3 * seconds, 1),
        "peak bytes": clock.peak,
        "remark": str(callback.report) if callback else "",
    }


def rows_of(name: str, device: torch.device, options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []

    def row(contender: str, **settings: Any) -> Row:
        found: Row = {"model": name, "contender": contender}
        callback = settings.pop("callback", None)
        try:
            found |= trained(name, device, options.steps, callback, **settings)
        except Exception as error:  # noqa: BLE001 (a row of its own)
            found["remark"] = f"{type(error).__name__}: {error!s:.300}"
        torch.compiler.reset()
        gc.collect()
        if device.type != "cpu":
            torch.accelerator.empty_cache()
        print(found, flush=True)
        rows.append(found)
        return found

    own: dict[str, Any] = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }
    plain = row("plain")
    switched = row("gradient_checkpointing=True", **own)
    # Inductor takes minutes on a processor, where this only shows that it runs.
    backend = "inductor" if device.type != "cpu" else "aot_eager"
    compiled = {"torch_compile": True, "torch_compile_backend": backend}
    row("the same, torch_compile=True", **compiled, **own)
    budgets: dict[str, Any] = {"80%": 0.8, "90%": 0.9}
    if device.type != "cpu":
        budgets = {"peak of gradient_checkpointing": switched.get("peak bytes", 0)}
        for share in options.shares:
            budgets[f"{share:.0%} of plain"] = int(share * plain.get("peak bytes", 0))
    for executor in options.executors:
        for label, budget in budgets.items():
            if budget:
                compile: Any = executor != "eager" and executor  # noqa: A001
                callback = RecoupCallback(budget, compile=compile)
                row(f"RecoupCallback ({executor}) at {label}", callback=callback)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--steps", type=int, default=20)
    run_models(parser, arguments, "hf-trainer", rows_of, "steps")


if __name__ == "__main__":
    main()

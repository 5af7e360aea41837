"""Fine-tuning with transformers' Trainer: the callback against the Trainer's switches.

Llama with 1.1 billion parameters, and LoRA on one with 7 billion, from configuration
with random weights. For each: plain, `gradient_checkpointing=True`, the same with
`torch_compile=True`, and `RecoupCallback` at the peak of the first of these two and at
shares of the plain peak, eager and compiled. Tokens per second are those of the steps
after the warm-up, the peak is that of the same steps.

`--limit 540` begins no row after so many seconds; the same command goes on later.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.ecosystem import build
from benchmarks.harness import (
    Row,
    Table,
    device_at_hand,
    numbers,
    parsed,
    synchronize,
)
from recoup.integrations.transformers import RecoupCallback

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
    options: argparse.Namespace,
    callback: RecoupCallback | None,
    **settings: Any,
) -> dict[str, Any]:
    """Train a new model; return tokens per second, peak and time of a step."""
    large = not options.small
    case = build(MODELS[name], device, large=large)
    rows, length = case.inputs["input_ids"].shape
    clock = Clock(device)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=rows,
            max_steps=WARMUP + options.steps,
            use_cpu=device.type == "cpu",
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
            model=case.model,
            args=arguments,
            train_dataset=Repeated(case.inputs["input_ids"][0].cpu()),
            callbacks=callbacks,
        ).train()
    torch.compiler.reset()
    seconds = clock.seconds / clock.steps
    return {
        "tokens/s": round(rows * length / seconds),
        "peak GiB": round(clock.peak / 2**30, 3) if clock.peak else None,
        "ms": round(1e3 * seconds, 1),
        "peak bytes": clock.peak or None,
        "remark": str(callback.report) if callback else "",
    }


def measure_model(
    name: str, device: torch.device, table: Table, options: argparse.Namespace
) -> None:
    """Measure every contender of a model that is not in the table yet."""

    def row(contender: str, **settings: Any) -> Row:
        def measure() -> Row:
            budget = settings.pop("budget", None)
            executor: Any = settings.pop("executor", False)
            callback = budget and RecoupCallback(budget, compile=executor)
            return trained(name, device, options, callback or None, **settings)

        return table.row(name, contender, measure)

    own: dict[str, Any] = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }
    # Inductor takes minutes on a CPU, where this only shows that it runs.
    backend = "inductor" if device.type != "cpu" else "aot_eager"
    compiled = {"torch_compile": True, "torch_compile_backend": backend}
    plain = row("plain")
    switched = row("gradient_checkpointing=True", **own)
    row("gradient_checkpointing=True, torch_compile=True", **compiled, **own)
    budgets: dict[str, Any] = {f"{share:.0%} of plain": share for share in (0.8, 0.9)}
    if device.type != "cpu":
        budgets = {"peak of gradient_checkpointing": switched.get("peak bytes")}
        for share in options.shares:
            peak: Any = plain.get("peak bytes")
            budgets[f"{share:.0%} of plain"] = peak and int(share * peak)
    for executor in options.executors.split(","):
        for label, budget in budgets.items():
            if budget:
                row(
                    f"RecoupCallback, {executor}, {label}",
                    budget=budget,
                    executor=executor != "eager" and executor,
                )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--executors", default="eager,inductor,exact")
    parser.add_argument("--shares", type=numbers, default="0.75,0.5")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit", type=float, default=float("inf"))
    parser.add_argument("--small", action="store_true", help="seconds, no meaning")
    options = parsed(parser, arguments)
    device = device_at_hand()
    options.small = options.small or device.type == "cpu"
    settings = {
        "steps": options.steps,
        "dtype": "bfloat16 on a GPU",
        "models": "small" if options.small else "large",
    }
    table = Table("hf-trainer", device, settings, options.out, options.limit)
    try:
        for name in options.models.split(","):
            measure_model(name, device, table, options)
    except TimeoutError as error:
        print(f"Not finished: {error}. The same command goes on from here.")


if __name__ == "__main__":
    main()

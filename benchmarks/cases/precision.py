"""Is the trainer ever slower or larger than the same loop written by hand?"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import (
    Pace,
    Row,
    Spread,
    describe_pace,
    device_at_hand,
    in_turns,
    markdown_table,
    pace_of,
    parsed,
    publish,
    synchronize,
)
from benchmarks.resnet import ResNet
from recoup import Trainer, TrainerSettings
from recoup.cli.gpt import GPT, Shape
from recoup.precision.mixed_precision import Precision

GPT_SHAPE = Shape(layers=24, width=1024, heads=16, vocabulary=50304, context=1024)
SMALL_SHAPE = Shape(layers=4, width=64, heads=4, vocabulary=256, context=64)
TYPES: dict[Precision, torch.dtype | None] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
STEPS_IN_A_ROW = 6
LOSS_SCALE = 1024.0
"""Small enough for the first steps not to overflow: a skipped one takes less time."""


@dataclass
class Problem:
    """A model that returns its loss, a batch, and its optimizer."""

    name: str
    model: nn.Module
    batch: tuple[Tensor, Tensor]
    optimizer: torch.optim.Optimizer

    @property
    def device(self) -> torch.device:
        return self.batch[0].device


def make_problem(name: str, device: torch.device, *, small: bool) -> Problem:
    torch.manual_seed(0)
    with device:
        if name == "GPT":
            shape = SMALL_SHAPE if small else GPT_SHAPE
            model: nn.Module = GPT(shape)
            count = 2 if small else 16
            tokens = torch.randint(shape.vocabulary, (2, count, shape.context))
            batch = tokens[0].to(device), tokens[1].to(device)
        else:
            model = ResNet((1, 1), width=8) if small else ResNet()
            count, side = (2, 32) if small else (192, 224)
            batch = (
                torch.randn(count, 3, side, side, device=device),
                torch.randint(1000, (count,), device=device),
            )
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    return Problem(name, model, batch, optimizer)


class ByHand:
    """What a careful person writes with torch.amp and torch.utils.checkpoint."""

    def __init__(
        self, problem: Problem, precision: Precision, *, recompute: bool
    ) -> None:
        self._problem = problem
        self._dtype = TYPES[precision]
        self._recompute = recompute
        self._scaler = torch.amp.GradScaler(
            problem.device.type, LOSS_SCALE, enabled=precision == "fp16"
        )

    def prepare(self) -> None:
        pass

    def step(self) -> None:
        problem, scaler = self._problem, self._scaler
        with torch.autocast(
            problem.device.type, self._dtype, enabled=self._dtype is not None
        ):
            if self._recompute:
                loss = problem.model(*problem.batch, run_recomputed)
            else:
                loss = problem.model(*problem.batch)
        scaler.scale(loss).backward()
        scaler.step(problem.optimizer)
        scaler.update()
        problem.optimizer.zero_grad()

    def close(self) -> None:
        pass


def run_recomputed(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


class ByTrainer:
    """The same by recoup's trainer, with its defaults."""

    def __init__(
        self, problem: Problem, precision: Precision, *, recompute: bool
    ) -> None:
        self._problem = problem
        self._settings = TrainerSettings(
            precision=precision,
            use_gradient_checkpointing=recompute,
            initial_loss_scale=LOSS_SCALE,
        )
        self._trainer: Trainer | None = None

    def prepare(self) -> None:
        problem = self._problem
        self._trainer = Trainer(problem.model, problem.optimizer, self._settings)

    def step(self) -> None:
        assert self._trainer is not None, "prepared before"
        self._trainer.step(self._problem.batch)

    def close(self) -> None:
        assert self._trainer is not None, "prepared before"
        self._trainer.release()
        self._trainer = None


@dataclass(frozen=True, slots=True)
class Measured:
    """The times of a contender's steps, and their peak."""

    pace: Pace
    peak_bytes: int


def measured_steps(
    contender: ByHand | ByTrainer, device: torch.device, *, warmup: int, steps: int
) -> Measured:
    """Run some steps, after what a training run does once.

    What a trainer does in its first steps (verify regions, copy buffers, warm up a loss
    scale) is warm-up here.
    """
    contender.prepare()
    for _ in range(warmup):
        contender.step()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    pace = pace_of(contender.step, device, steps=steps)
    peak_bytes = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    contender.close()
    return Measured(pace, peak_bytes)


def table_rows(problem: Problem, *, rounds: int) -> list[Row]:
    """Measure the configurations of the seed's table, by hand and by the trainer."""
    rows: list[Row] = []
    for precision in TYPES:
        for recompute in (False, True):
            contenders = {
                "by hand": ByHand(problem, precision, recompute=recompute),
                "Trainer": ByTrainer(problem, precision, recompute=recompute),
            }
            measures = {
                name: partial(
                    measured_steps,
                    contender,
                    problem.device,
                    warmup=2,
                    steps=STEPS_IN_A_ROW,
                )
                for name, contender in contenders.items()
            }
            results = in_turns(measures, warmup=0, rounds=rounds)
            row: dict[str, Any] = {
                "model": problem.name,
                "precision": precision,
                "checkpointing": "yes" if recompute else "no",
            }
            for name, measured in results.items():
                spread = Spread.of([1e3 * run.pace.in_a_row for run in measured])
                alone = Spread.of([1e3 * run.pace.alone for run in measured])
                peak_bytes = max(run.peak_bytes for run in measured)
                row[f"{name} ms"] = round(spread.median, 2)
                row[f"{name} least to largest"] = (
                    f"{spread.least:.2f} to {spread.largest:.2f}"
                )
                row[f"{name} alone ms"] = round(alone.median, 2)
                row[f"{name} GiB"] = (
                    round(peak_bytes / 2**30, 3) if peak_bytes else None
                )
            row["time"] = round(row["Trainer ms"] / row["by hand ms"], 3)
            row["time alone"] = round(
                row["Trainer alone ms"] / row["by hand alone ms"], 3
            )
            print(markdown_table([row]).splitlines()[-1], flush=True)
            rows.append(row)
    return rows


def overhead_rows(device: torch.device, *, rounds: int) -> list[Row]:
    """Measure what the trainer adds to a step in which there is nothing to do."""
    rows: list[Row] = []
    for precision in TYPES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        model.to(device)
        batch = torch.randn(4, 16, device=device), torch.randn(4, 16, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        settings = TrainerSettings(precision=precision, initial_loss_scale=LOSS_SCALE)
        trainer = Trainer(model, optimizer, settings, functional.mse_loss)
        scaler = torch.amp.GradScaler(
            device.type, LOSS_SCALE, enabled=precision == "fp16"
        )
        plain = partial(
            plain_step, model, optimizer, scaler, batch, dtype=TYPES[precision]
        )
        contenders: dict[str, Callable[[], float]] = {
            "by hand": partial(host_seconds, plain, device),
            "Trainer": partial(host_seconds, partial(trainer.step, batch), device),
        }
        results = in_turns(contenders, warmup=20, rounds=rounds)
        hand, ours = (Spread.of(results[name]).median for name in contenders)
        rows.append(
            {
                "model": f"two layers of 16, {device.type}",
                "precision": precision,
                "by hand us": round(1e6 * hand),
                "Trainer us": round(1e6 * ours),
                "added us": round(1e6 * (ours - hand)),
                "share of a 10 ms step": round((ours - hand) / 0.01, 4),
            }
        )
    return rows


def plain_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    batch: tuple[Tensor, Tensor],
    *,
    dtype: torch.dtype | None,
) -> None:
    inputs, targets = batch
    with torch.autocast(inputs.device.type, dtype, enabled=dtype is not None):
        loss = functional.mse_loss(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def host_seconds(step: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="seconds, no meaning")
    parser.add_argument("--parts", default="gpt,res", help="of: gpt, res")
    options = parsed(parser, arguments)
    device = device_at_hand()
    small = options.small or device.type == "cpu"
    parts = options.parts.split(",")
    overhead = overhead_rows(device, rounds=50 if small else 300)
    print(markdown_table(overhead), flush=True)
    rows: list[Row] = []
    for name in ("GPT", "ResNet-50"):
        if name.lower()[:3] in parts:
            problem = make_problem(name, device, small=small)
            rows += table_rows(problem, rounds=1 if small else 3)
            del problem
    print(markdown_table(rows))
    settings = {
        "GPT": f"{SMALL_SHAPE if small else GPT_SHAPE}, batch {2 if small else 16}",
        "ResNet-50": "2 x 3 x 32 x 32" if small else "192 x 3 x 224 x 224",
        "optimizer": "AdamW, fused on a GPU",
        "ms": describe_pace(STEPS_IN_A_ROW),
    }
    for theme, found in (("precision", rows), ("trainer-overhead", overhead)):
        if found:
            publish(theme, found, device=device, settings=settings, folder=options.out)


if __name__ == "__main__":
    main()

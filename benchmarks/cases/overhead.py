"""The cost of a scope around every block, versus torch's own checkpointing."""

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders import CONTENDERS
from benchmarks.harness import (
    Result,
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
from benchmarks.models import LARGE, MEDIUM, TINY, Problem
from recoup.backend.operators.dispatch import OperatorMode
from recoup.cli.gpt import Block, RunBlock, Shape, run_plain

STEPS_IN_A_ROW = 4


def timed_step(problem: Problem, run_block: RunBlock) -> tuple[float, float, int]:
    """Return the step's seconds, the host's seconds, and the peak in bytes."""
    device = problem.tokens.device
    problem.clear_gradients()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    problem.loss(run_block).backward()
    host_seconds = time.perf_counter() - start
    synchronize(device)
    seconds = time.perf_counter() - start
    on_gpu = device.type == "cuda"
    peak_bytes = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    return seconds, host_seconds, peak_bytes


def seconds_in_a_row(problem: Problem, run_block: RunBlock) -> float:
    """Return the seconds of a step among several that follow each other."""

    def step() -> None:
        problem.clear_gradients()
        problem.loss(run_block).backward()

    return pace_of(step, problem.tokens.device, steps=STEPS_IN_A_ROW).in_a_row


def step_columns(problem: Problem, *, rounds: int) -> dict[str, Row]:
    """Measure whole steps of all contenders, in turns."""
    steps = {n: partial(timed_step, problem, run) for n, run in CONTENDERS.items()}
    rows = {n: partial(seconds_in_a_row, problem, run) for n, run in CONTENDERS.items()}
    paces = in_turns(rows, warmup=1, rounds=max(1, rounds // 3))
    columns: dict[str, Row] = {}
    for name, runs in in_turns(steps, warmup=3, rounds=rounds).items():
        in_a_row = Spread.of([1e3 * seconds for seconds in paces[name]])
        step = Spread.of([1e3 * seconds for seconds, _, _ in runs])
        host = Spread.of([1e3 * seconds for _, seconds, _ in runs])
        peak_bytes = max(peak for _, _, peak in runs)
        columns[name] = {
            "step ms": round(in_a_row.median, 2),
            "least to largest": f"{in_a_row.least:.2f} to {in_a_row.largest:.2f}",
            "alone ms": round(step.median, 2),
            "alone, least to largest": f"{step.least:.2f} to {step.largest:.2f}",
            "host ms": round(host.median, 2),
            "peak GiB": round(peak_bytes / 2**30, 3) if peak_bytes else None,
        }
    return columns


def forward_seconds(problem: Problem, run_block: RunBlock) -> tuple[float, float]:
    """Return the host's seconds in forward, and in forward and backward."""
    problem.clear_gradients()
    synchronize(problem.tokens.device)
    start = time.perf_counter()
    loss = problem.loss(run_block)
    forward = time.perf_counter() - start
    loss.backward()
    return forward, time.perf_counter() - start


def operator_columns(device: torch.device, *, rounds: int) -> dict[str, Row]:
    """Measure the host's time per operator, on operators that take no time."""
    problem = Problem.make(TINY, 1, device=device, dtype=torch.float32)
    operators = count_operators(problem)
    steps = {n: partial(forward_seconds, problem, run) for n, run in CONTENDERS.items()}
    results = in_turns(steps, warmup=10, rounds=rounds)
    plain_forward, plain_step = medians(results["plain"])
    columns: dict[str, Row] = {}
    for name, runs in results.items():
        forward, step = medians(runs)
        columns[name] = {
            f"us per operator, forward, {device.type}": round(
                1e6 * (forward - plain_forward) / operators, 2
            ),
            f"us per operator, step, {device.type}": round(
                1e6 * (step - plain_step) / operators, 2
            ),
        }
    return columns


def medians(runs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    forwards, steps = zip(*runs, strict=True)
    return Spread.of(forwards).median, Spread.of(steps).median


class OperatorCounter(OperatorMode):
    """Count the operators that reach the dispatcher below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        self.count += 1
        return func(*args, **(kwargs or {}))


def count_operators(problem: Problem) -> int:
    """Count the operators of one forward that lie inside blocks."""
    counter = OperatorCounter()

    def run_counted(block: Block, hidden: Tensor) -> Tensor:
        with counter:
            return block(hidden)

    problem.loss(run_counted)
    return counter.count


def gradient_columns(
    shape: Shape, batch: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Row]:
    """Compare every contender's gradients with the plain run's, bit by bit.

    Not in the process that takes times: repeatable kernels are slower, and cuBLAS
    reads only once, when it starts, whether to use them.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    problem = Problem.make(shape, batch, device=device, dtype=dtype)
    expected = step_gradients(problem, run_plain)
    columns: dict[str, Row] = {}
    for name, run_block in CONTENDERS.items():
        found = step_gradients(problem, run_block)
        equal = all(map(torch.equal, expected, found))
        columns[name] = {"gradients": "equal" if equal else "differ"}
    return columns


def elsewhere(task: Callable[..., Result], *arguments: Any) -> Result:
    """Run a task in a process of its own, so that it may set torch up for itself."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(task, *arguments).result()


def step_gradients(problem: Problem, run_block: RunBlock) -> list[Tensor]:
    problem.clear_gradients()
    problem.loss(run_block).backward()
    gradients = problem.gradients()
    problem.clear_gradients()
    return gradients


def kernel_columns(problem: Problem) -> dict[str, Row]:
    """Count the kernels that one step of each contender launches."""
    columns: dict[str, Row] = {}
    activities = [torch.profiler.ProfilerActivity.CUDA]
    for name, run_block in CONTENDERS.items():
        problem.clear_gradients()
        with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
            problem.loss(run_block).backward()
            synchronize(problem.tokens.device)
        columns[name] = {"kernels": sum(map(is_kernel, profiler.events() or []))}
    return columns


def is_kernel(event: Any) -> bool:
    on_device = event.device_type.name == "CUDA"
    return on_device and not event.name.startswith(("Memcpy", "Memset"))


def merge(parts: Sequence[dict[str, Row]]) -> list[Row]:
    """Join the columns of several measurements into one row a contender."""
    return [
        {"contender": name, **{k: v for part in parts for k, v in part[name].items()}}
        for name in CONTENDERS
    ]


def measure(device: torch.device, *, small: bool) -> tuple[list[Row], dict[str, Any]]:
    """Return the rows of the table and the settings they were measured with."""
    on_gpu = device.type == "cuda"
    shape = LARGE if on_gpu and not small else MEDIUM
    batch = 8 if on_gpu else 2
    dtype = torch.bfloat16 if on_gpu else torch.float32
    problem = Problem.make(shape, batch, device=device, dtype=dtype)
    parts = [step_columns(problem, rounds=3 if small else 9)]
    parts.append(elsewhere(gradient_columns, shape, batch, device, dtype))
    if on_gpu:
        parts.append(kernel_columns(problem))
    for kind in ("cpu", device.type) if on_gpu else ("cpu",):
        rounds = 10 if small else 100
        parts.append(operator_columns(torch.device(kind), rounds=rounds))
    tiny = Problem.make(TINY, 1, device=torch.device("cpu"), dtype=torch.float32)
    settings = {
        "step": f"{shape}, batch {batch}, {dtype}",
        "step ms": describe_pace(STEPS_IN_A_ROW),
        "us per operator": f"{TINY}, batch 1, {count_operators(tiny)} operators",
    }
    return merge(parts), settings


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="seconds, no meaning")
    options = parsed(parser, arguments)
    device = device_at_hand()
    rows, settings = measure(device, small=options.small)
    print(markdown_table(rows))
    publish("overhead", rows, device=device, settings=settings, folder=options.out)


if __name__ == "__main__":
    main()

"""Do copies to the host hide behind the computation, and does the peak fall by them?"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from benchmarks.cases.overhead import elsewhere, step_gradients
from benchmarks.harness import (
    Pace,
    Row,
    Spread,
    describe_pace,
    device_at_hand,
    in_turns,
    markdown_table,
    parsed,
    publish,
    seconds_in_a_row,
    synchronize,
)
from benchmarks.models import LARGE, MEDIUM, WIDE, Problem
from recoup import CheckpointScope, Host
from recoup.cli.gpt import Block, RunBlock, Shape, run_plain
from recoup.engine.tiers.host import pool_of
from recoup.tiers import ExactTier, Stored, tier_usage

SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)
WINDOWS_BYTES = (128 << 20, 2 << 30)
"""Beside the default, measured with a quarter moved."""

STEPS_IN_A_ROW = 3
SHAPES = {"2048": LARGE, "4096": WIDE}


class Share(ExactTier):
    """Moves a share of the bytes to the host, evenly spread; the rest stays."""

    def __init__(self, share: float, host: Host) -> None:
        self._share = share
        self._host = host
        self._due_bytes = 0.0

    def takes(self, nbytes: int) -> bool:
        if not self._host.takes(nbytes):
            return False
        self._due_bytes += self._share * nbytes
        # Half of it is as near as whole values come.
        if self._due_bytes < nbytes / 2:
            return False
        self._due_bytes -= nbytes
        return True

    def put(self, storage: Tensor, guard: Tensor | None = None) -> Stored:
        return self._host.put(storage, guard)


def run_kept(block: Block, hidden: Tensor) -> Tensor:
    with CheckpointScope("block", use_recomputation=False):
        return block(hidden)


def run_moved(tier: ExactTier, block: Block, hidden: Tensor) -> Tensor:
    with CheckpointScope("block", store=tier):
        return block(hidden)


def run_save_on_cpu(block: Block, hidden: Tensor) -> Tensor:
    with save_on_cpu(pin_memory=True):
        return block(hidden)


def contenders(host: Host) -> dict[str, RunBlock]:
    found: dict[str, RunBlock] = {
        "plain": run_plain,
        "scope, all kept on the device": run_kept,
        "torch save_on_cpu, pinned": run_save_on_cpu,
    }
    for share in SHARES:
        found[f"host, {share:.3g} of it"] = partial(run_moved, Share(share, host))
    for window_bytes in WINDOWS_BYTES:
        tier = Share(0.25, replace(host, window_bytes=window_bytes))
        found[f"host, 0.25 of it, window {window_bytes >> 20} MiB"] = partial(
            run_moved, tier
        )
    return found


@dataclass(frozen=True, slots=True)
class Measured:
    """One step: seconds, bytes at the peak, and bytes moved."""

    forward_seconds: float
    seconds: float
    host_seconds: float
    peak_bytes: int
    out_bytes: int
    back_bytes: int


def measured_steps(problem: Problem, run_block: RunBlock) -> tuple[Measured, Pace]:
    """Measure one step by itself, and the time of one among several in a row."""

    def step() -> None:
        problem.clear_gradients()
        problem.loss(run_block).backward()

    measured = measured_step(problem, run_block)
    seconds = seconds_in_a_row(
        step, problem.tokens.device, steps=STEPS_IN_A_ROW, alone=measured.seconds
    )
    return measured, Pace(measured.seconds, seconds)


def measured_step(
    problem: Problem, run_block: RunBlock, *, apart: bool = False
) -> Measured:
    """Run a step; `apart` waits for the device between forward and backward."""
    device = problem.tokens.device
    problem.clear_gradients()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    before = tier_usage()["host"]
    start = time.perf_counter()
    loss = problem.loss(run_block)
    if apart:
        synchronize(device)
    forward_seconds = time.perf_counter() - start
    loss.backward()
    host_seconds = time.perf_counter() - start
    synchronize(device)
    seconds = time.perf_counter() - start
    after = tier_usage()["host"]
    on_gpu = device.type == "cuda"
    return Measured(
        forward_seconds,
        seconds,
        host_seconds,
        torch.cuda.max_memory_allocated(device) if on_gpu else 0,
        after.out_bytes - before.out_bytes,
        after.back_bytes - before.back_bytes,
    )


@dataclass(frozen=True, slots=True)
class Bound:
    """What no schedule of the copies can beat, when steps follow each other.

    A value leaves after it is made, and what is made last is needed first: so what
    leaves hides behind forward, and what comes back behind backward.
    """

    forward_seconds: float
    backward_seconds: float
    out_bytes_per_second: float
    back_bytes_per_second: float

    def seconds(self, out_bytes: int, back_bytes: int) -> float:
        out = out_bytes / self.out_bytes_per_second
        back = back_bytes / self.back_bytes_per_second
        return max(self.forward_seconds, out) + max(self.backward_seconds, back)


def link(device: torch.device) -> tuple[float, float]:
    """Return the bytes per second of large copies to pinned memory and back."""
    if device.type != "cuda":
        return 1e10, 1e10
    there = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    here = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    rates: list[float] = []
    for target, source in ((here, there), (there, here)):
        seconds: list[float] = []
        for _ in range(5):
            synchronize(device)
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        rates.append(here.nbytes / min(seconds))
    return rates[0], rates[1]


def bound_of(
    problem: Problem, plain_seconds: float, device: torch.device, *, rounds: int
) -> Bound:
    """Return the bound, given the time of a plain step among others in a row."""
    steps = [measured_step(problem, run_plain, apart=True) for _ in range(rounds + 2)]
    forward = Spread.of([step.forward_seconds for step in steps[2:]]).median
    whole = Spread.of([step.seconds for step in steps[2:]]).median
    forward *= plain_seconds / whole
    return Bound(forward, plain_seconds - forward, *link(device))


def rows_of(
    label: str, problem: Problem, *, device: torch.device, rounds: int
) -> list[Row]:
    # Small values are few bytes and many copies.
    host = Host(smallest_bytes=1 << 20 if device.type == "cuda" else 1 << 16)
    steps: dict[str, Callable[[], tuple[Measured, Pace]]] = {
        name: partial(measured_steps, problem, run)
        for name, run in contenders(host).items()
    }
    results = in_turns(steps, warmup=1, rounds=rounds)
    plain_bytes = max(run.peak_bytes for run, _ in results["plain"])
    plain = Spread.of([pace.in_a_row for _, pace in results["plain"]])
    bound = bound_of(problem, plain.median, device, rounds=rounds)
    rows = [
        row_of(label, name, runs, plain_bytes, bound) for name, runs in results.items()
    ]
    pool_of(device.type).clear()
    return rows


def row_of(
    label: str,
    name: str,
    runs: Sequence[tuple[Measured, Pace]],
    plain_bytes: int,
    bound: Bound,
) -> Row:
    step = Spread.of([1e3 * pace.in_a_row for _, pace in runs])
    alone = Spread.of([1e3 * run.seconds for run, _ in runs])
    host = Spread.of([1e3 * run.host_seconds for run, _ in runs])
    peak_bytes = max(run.peak_bytes for run, _ in runs)
    last = runs[-1][0]
    row: dict[str, Any] = {
        "model": label,
        "contender": name,
        "step ms": round(step.median, 2),
        "least to largest": f"{step.least:.1f} to {step.largest:.1f}",
        "alone ms": round(alone.median, 2),
        "host ms": round(host.median, 2),
        "peak GiB": round(peak_bytes / 2**30, 3) if peak_bytes else None,
    }
    if last.out_bytes == 0:
        return row
    limit = 1e3 * bound.seconds(last.out_bytes, last.back_bytes)
    return row | {
        "out GiB": round(last.out_bytes / 2**30, 3),
        "back GiB": round(last.back_bytes / 2**30, 3),
        "bound ms": round(limit, 2),
        "above bound": f"{100 * (step.median / limit - 1):.1f} %",
        "moved GB/s": round((last.out_bytes + last.back_bytes) / step.median / 1e6, 1),
        "peak fell GiB": round((plain_bytes - peak_bytes) / 2**30, 3),
    }


def gradients_agree(shape: Shape, batch: int, device: torch.device) -> bool:
    """Compare gradients bit by bit, where torch itself gives the same bits twice."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    problem = Problem.make(shape, batch, device=device, dtype=dtype)
    expected = step_gradients(problem, run_plain)
    run = partial(run_moved, Host(smallest_bytes=1 << 16, window_bytes=64 << 20))
    return all(
        all(map(torch.equal, expected, step_gradients(problem, run))) for _ in range(3)
    )


def measure(
    device: torch.device, *, small: bool, widths: Sequence[str]
) -> tuple[list[Row], dict[str, Any]]:
    on_gpu = device.type == "cuda"
    full = on_gpu and not small
    shapes = {f"d {width}": SHAPES[width] for width in widths}
    if not full:
        shapes = {"small": MEDIUM}
    batch = 8 if full else 2
    dtype = torch.bfloat16 if on_gpu else torch.float32
    agree = elsewhere(gradients_agree, LARGE if full else MEDIUM, batch, device)
    rows: list[Row] = []
    for label, shape in shapes.items():
        problem = Problem.make(shape, batch, device=device, dtype=dtype)
        rounds = {LARGE: 5, WIDE: 3}.get(shape, 2)
        rows += rows_of(label, problem, device=device, rounds=rounds)
        del problem
        if on_gpu:
            torch.cuda.empty_cache()
    out, back = link(device)
    settings = {
        "step ms": describe_pace(STEPS_IN_A_ROW),
        "models": "; ".join(f"{name}: {shape}" for name, shape in shapes.items()),
        "batch": f"{batch}, {dtype}",
        "link": f"{out / 1e9:.1f} GB/s out, {back / 1e9:.1f} GB/s back",
        "window": f"{Host().window_bytes >> 20} MiB unless it says otherwise",
        "gradients": "equal to plain, bit by bit" if agree else "DIFFER",
    }
    return rows, settings


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="seconds, no meaning")
    parser.add_argument("--widths", nargs="+", choices=SHAPES, default=list(SHAPES))
    options = parsed(parser, arguments)
    device = device_at_hand(threads=None)
    rows, settings = measure(device, small=options.small, widths=options.widths)
    print(markdown_table(rows))
    print(settings)
    publish("offload", rows, device=device, settings=settings, folder=options.out)


if __name__ == "__main__":
    main()

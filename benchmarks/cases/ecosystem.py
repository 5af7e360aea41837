"""Models nobody here wrote against the switch their users have, at equal measured peak.

For each model: the eager step, its own gradient checkpointing, its blocks compiled with
torch's `activation_memory_budget`, and recoup: `fit` at the peak of the model's own
checkpointing, at the measured peak of each of torch's budgets, and at shares of the
eager peak. Every contender is prepared once (compiled or fitted) and its peak measured;
then all of them are timed in turns: a round runs each for some steps. Models have
random weights; nothing is downloaded.

With `--lock FILE` several processes may work on different models: all of them compile
at once, for torch's budgets and inside `fit`, but one at a time measures. Contenders
that are not prepared `--limit` seconds after the start are left out, and no round
begins after `--end`: rows are written with the rounds that ran. `--compile-only`
fills the compiler's caches for torch's budgets, beside a process that needs them.

    python -m benchmarks.cases.ecosystem --models llama,t5 --limit 240
"""

import argparse
import fcntl
import gc
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import recoup
from benchmarks.ecosystem import CASES, build
from benchmarks.harness import (
    Row,
    Table,
    device_at_hand,
    mark,
    numbers,
    parsed,
    synchronize,
)
from benchmarks.zoo.peers import Compiled
from recoup.backend.memory.meters import interval_meter
from recoup.engine.applied.model_blocks import block_names, repeated_names
from recoup.fitting.block_search import BlockSearch
from recoup.fitting.compiled_fit import CompiledFit
from recoup.measurement.timing.block_bench import BlockBench

Active = Callable[[], AbstractContextManager[object]]
"""Puts a prepared contender on the model."""


_STARTED = time.perf_counter()


def seconds_since_start() -> float:
    """Return how long ago this program began."""
    return time.perf_counter() - _STARTED


class OutOfTimeError(Exception):
    """A contender took longer than its limit to prepare."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTimeError` in the block after some seconds."""

    def stop(*_: object) -> None:
        raise OutOfTimeError(f"more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Turns:
    """The device, which one of several processes at a time may measure on.

    Args:
        path: The file that is locked; None: there are no others.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("w")
        self._holds = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait until no other process is in this block."""
        self._take()
        try:
            yield
        finally:
            self._give()

    @contextmanager
    def given(self) -> Iterator[None]:
        """Let others measure while this process compiles."""
        if not self._holds:
            yield
            return
        self._give()
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._holds = True

    def _give(self) -> None:
        self._holds = False
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            time.sleep(0.1)  # or this process takes it again before another wakes


@contextmanager
def compiling_beside(turns: Turns) -> Iterator[None]:
    """Let others measure whenever `fit` calls something that is not compiled yet."""
    measure, apply = BlockBench.measure, BlockSearch.apply

    def measured(bench: BlockBench, forward: Any) -> Any:
        with turns.given():
            bench.run(forward)
        return measure(bench, forward)

    def applied(search: BlockSearch, plan: Any) -> None:
        apply(search, plan)
        with turns.given():
            search.run()

    with (
        mock.patch.object(BlockBench, "measure", measured),
        mock.patch.object(BlockSearch, "apply", applied),
    ):
        yield


@dataclass
class Contender:
    """A way to run the step, prepared.

    Attributes:
        name: Its name.
        active: Puts it on the model.
        peak_bytes: The measured peak of a step.
        seconds: How long it took to prepare: to compile, to fit.
        remark: What else is known of it, or why it cannot run.
        times: For each round the time of a step, and the host's part.
    """

    name: str
    active: Active | None = None
    peak_bytes: int = 0
    seconds: float = 0.0
    remark: str = ""
    times: list[tuple[float, float]] = field(default_factory=list)

    def row(self) -> Row:
        row: dict[str, Any] = {"prepared s": round(self.seconds, 1)}
        if self.times:
            steps, hosts = zip(*self.times, strict=True)
            row = {
                "ms": round(1e3 * statistics.median(steps), 1),
                "least ms": round(1e3 * min(steps), 1),
                "most ms": round(1e3 * max(steps), 1),
                "peak GiB": round(self.peak_bytes / 2**30, 3),
                "host ms": round(1e3 * statistics.median(hosts), 1),
                "peak bytes": self.peak_bytes,
                **row,
            }
        return row | {"remark": self.remark}


class Bench:
    """One model on the device, and how its step is measured."""

    def __init__(self, name: str, device: torch.device, *, steps: int) -> None:
        large = device.type != "cpu"
        self.case = build(name, device, large=large)
        self.model = self.case.model
        self.device = device
        self.steps = steps if large else 2
        self.blocks = repeated_names(self.model, block_names(self.model))

    def step(self) -> None:
        self.case.run()
        self.model.zero_grad(set_to_none=True)

    def peak_bytes(self) -> int:
        """Return the peak of a step after three that warm up."""
        for _ in range(3):
            self.step()
        self.release()
        if self.device.type == "cpu":
            with interval_meter(self.device) as meter:
                self.step()
            inputs = self.case.inputs
            held = [*self.model.parameters()]
            held += inputs.values() if isinstance(inputs, dict) else [inputs]
            return meter.peak_bytes + sum(tensor.nbytes for tensor in held)
        torch.accelerator.reset_peak_memory_stats()
        self.step()
        synchronize(self.device)
        return torch.accelerator.max_memory_allocated()

    def times(self) -> tuple[float, float]:
        """Return the time of a step among several in a row, and the host's part."""
        for _ in range(2):
            self.step()
        gc.collect()
        since = mark(self.device)
        begun = time.perf_counter()
        for _ in range(self.steps):
            self.step()
        host = (time.perf_counter() - begun) / self.steps
        return since() / self.steps, host

    def release(self) -> None:
        """Free what no step needs any more."""
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        synchronize(self.device)
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()


@contextmanager
def own_checkpointing(bench: Bench) -> Iterator[None]:
    bench.case.switch(bench.model, on=True)
    try:
        yield
    finally:
        bench.case.switch(bench.model, on=False)


@contextmanager
def per_block(bench: Bench) -> Iterator[None]:
    for name in bench.blocks:
        recoup.checkpoint_module(bench.model.get_submodule(name))
    try:
        yield
    finally:
        for name in bench.blocks:
            recoup.uncheckpoint_module(bench.model.get_submodule(name))


def knob(bench: Bench, budget: float, limit: float) -> Active:
    """Compile each block by itself with torch's own budget."""
    compiled = Compiled(bench.model, budget)
    try:
        with time_limit(limit), compiled(bench.model):
            bench.step()
    except Exception as error:  # noqa: BLE001 (it fails again when it is measured)
        print(f"  torch knob {budget}: {type(error).__name__}", flush=True)
    bench.release()
    return lambda: compiled(bench.model)


def fitted(bench: Bench, budget: int, executor: Any) -> tuple[str, Active]:
    """Fit once; afterwards the plan is put on and taken off."""
    case = bench.case
    batch = case.inputs if case.target is None else (case.inputs, case.target)
    _, report = recoup.fit(
        bench.model,
        batch,
        budget,
        loss=None if case.target is None else case.loss,
        progress=False,
        compile=False if executor == "eager" else executor,
    )
    report.remove()
    text = (
        f"predicted {report.predicted_peak_bytes / 2**30:.2f} GiB "
        f"{1e3 * report.predicted_seconds:.0f} ms"
    )
    plan = report.plan
    if isinstance(report, CompiledFit):
        text += f", gradients {report.difference:.1e} (eager twice {report.noise:.1e})"
        text += ", other random numbers" if report.draws_otherwise else ""
        text += f", {len(report.eager)} blocks not compiled" if report.eager else ""
    else:
        text += f", {plan.regions} regions, {plan.repeated_calls} of them called again"

    @contextmanager
    def active() -> Iterator[None]:
        if isinstance(report, CompiledFit):
            applied: Any = report
            report.apply()
        else:
            applied = recoup.apply_plan(bench.model, report.plan)
        try:
            yield
        finally:
            applied.remove()

    return text, active


class Comparison:
    """All contenders of one model."""

    def __init__(
        self, name: str, device: torch.device, options: argparse.Namespace
    ) -> None:
        self._options = options
        self._turns = Turns(options.lock)
        self.bench = Bench(name, device, steps=options.steps)
        self.contenders: list[Contender] = []

    def measure(self) -> Iterator[tuple[str, Row]]:
        """Prepare every contender, time all of them in turns; yield their rows."""
        options = self._options
        knobs = {
            f"torch knob {share}": knob(self.bench, share, self._left(options.limit))
            for share in options.knobs
        }
        if options.compile_only:
            return
        with self._turns.held(), compiling_beside(self._turns):
            self._prepare_all(knobs)
        for _ in range(options.rounds):
            with self._turns.held():
                if not self._left(options.end):
                    break
                self._run_round()
        for contender in self.contenders:
            yield contender.name, contender.row()

    def _left(self, end: float) -> float:
        """Return the seconds that are left to prepare a contender."""
        return min(self._options.row_limit, max(end - seconds_since_start(), 0.0))

    def _prepare_all(self, knobs: Mapping[str, Active]) -> None:
        options, bench = self._options, self.bench
        eager = self._prepare("eager", lambda: ("", nullcontext))
        switch = partial(own_checkpointing, bench)
        own = self._prepare("own checkpointing", lambda: ("", switch))
        if options.regions:
            regions = partial(per_block, bench)
            self._prepare("recoup, a region per block", lambda: ("", regions))
        for executor in options.own:
            self._fit(f"fit ({executor}) at own checkpointing", own, executor)
        for name, active in knobs.items():
            found = self._prepare(name, lambda active=active: ("", active))
            if "inductor" in options.executors:
                self._fit(f"fit (inductor) at {name}", found, "inductor")
        for share in options.shares:
            asked = Contender("", peak_bytes=int(share * eager.peak_bytes))
            for executor in options.executors:
                self._fit(f"fit ({executor}) at {share:.0%}", asked, executor)

    def _fit(self, name: str, at: Contender, executor: str) -> None:
        if at.peak_bytes:
            self._prepare(name, lambda: fitted(self.bench, at.peak_bytes, executor))

    def _prepare(
        self, name: str, prepare: Callable[[], tuple[str, Active]]
    ) -> Contender:
        contender = Contender(name)
        self.contenders.append(contender)
        begun = time.perf_counter()
        try:
            with time_limit(self._left(self._options.limit)):
                contender.remark, active = prepare()
                with active():
                    contender.peak_bytes = self.bench.peak_bytes()
            contender.active = active
        except Exception as error:  # noqa: BLE001 (a row of its own)
            contender.remark = f"{type(error).__name__}: {error!s:.200}"
        contender.seconds = time.perf_counter() - begun
        self.bench.release()
        print(f"  {name}: {contender.peak_bytes} bytes, {contender.row()}", flush=True)
        return contender

    def _run_round(self) -> None:
        for contender in self.contenders:
            if contender.active is not None:
                with contender.active():
                    contender.times.append(self.bench.times())
                self.bench.release()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--own", default="eager,exact", help="at the own peak")
    parser.add_argument("--executors", default="inductor", help="at the other peaks")
    parser.add_argument("--shares", type=numbers, default="0.9,0.75,0.6,0.5,0.4")
    parser.add_argument("--knobs", type=numbers, default="1,0.7,0.5,0.3,0.1,0")
    parser.add_argument("--regions", action="store_true", help="a region per block too")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--limit", type=float, default=1e6, help="nothing is prepared after: seconds"
    )
    parser.add_argument(
        "--end", type=float, default=1e6, help="no round begins after: seconds"
    )
    parser.add_argument("--compile-only", action="store_true", help="for torch's knobs")
    parser.add_argument(
        "--row-limit", type=float, default=240, help="seconds to prepare a contender"
    )
    parser.add_argument("--lock", type=Path, help="shared with other processes")
    options = parsed(parser, arguments)
    for name in ("own", "executors"):
        values = getattr(options, name).split(",")
        setattr(options, name, [value for value in values if value])
    device = device_at_hand()
    settings = {
        "steps in a row": options.steps,
        "rounds": options.rounds,
        "dtype": "bfloat16 on a GPU",
    }
    table = Table("ecosystem", device, settings, options.out, float("inf"))
    for name in options.models.split(","):
        if any(row["model"] == name for row in table.rows):
            continue  # measured today, with the same settings
        for contender, row in Comparison(name, device, options).measure():
            table.row(name, contender, lambda row=row: row)
        gc.collect()


if __name__ == "__main__":
    main()

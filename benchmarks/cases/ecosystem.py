"""Models nobody here wrote against the switch their users have, at equal measured peak.

For each model: the eager step, its own gradient checkpointing, its blocks compiled with
torch's `activation_memory_budget`, and recoup: `fit` at the peak of the model's own
checkpointing, at the measured peak of each of torch's budgets, and at shares of the
eager peak. Every contender is prepared once (compiled or fitted) and its peak measured;
then all of them are timed in turns: a round runs each for some steps. Models have
random weights; nothing is downloaded.

Each model has its own process. All of them compile at once, for torch's budgets and
inside `fit`, but one at a time measures, and rounds begin when none compiles any more.
Contenders that are not prepared `--limit` seconds after the start are left out, and no
round begins after `--end`. A row is appended to `rows.jsonl` in `--out` when its peak
is measured, and again after each round: a run that is killed loses nothing that it
measured. `python -m benchmarks.journal` joins the rows of many runs; with `--missing`
cells that it has are left out. On a CPU, and with `--small`, models are tiny.

    python -m benchmarks.cases.ecosystem --models llama,t5 --limit 400 --end 560
"""

import argparse
import fcntl
import gc
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    describe_machine,
    device_at_hand,
    mark,
    numbers,
    parsed,
    synchronize,
)
from benchmarks.journal import THEME, Journal, hardware, is_infeasible, rows_in
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
        ends: When preparation ends, in seconds since the start.
    """

    def __init__(self, path: Path | None, ends: float) -> None:
        self._ends = ends
        self._file = None if path is None else path.open("w")
        self._preparing = None if path is None else path.with_suffix(".2").open("w")
        self._holds = False
        if self._preparing is not None:
            fcntl.flock(self._preparing, fcntl.LOCK_SH)

    def wait_for_others(self, until: float) -> bool:
        """Return whether all processes are prepared; wait for them until a time."""
        if self._preparing is None:
            return True
        fcntl.flock(self._preparing, fcntl.LOCK_UN)
        while True:
            try:
                fcntl.flock(self._preparing, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if seconds_since_start() > until:
                    return False
                time.sleep(0.1)
            else:
                fcntl.flock(self._preparing, fcntl.LOCK_UN)
                return True

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
            # The time limit of a contender does not count the wait for others.
            left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            if left:
                left = min(left, self._ends - seconds_since_start())
                signal.setitimer(signal.ITIMER_REAL, max(left, 0.001))
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
        predicted: What `fit` predicted for it, and for which budget.
        remark: What else is known of it, or why it cannot run.
        failed: The error that shows that it cannot.
        times: For each round the time of a step, and the host's part.
    """

    name: str
    active: Active | None = None
    peak_bytes: int = 0
    seconds: float = 0.0
    predicted: Row = field(default_factory=dict[str, Any])
    remark: str = ""
    failed: str = ""
    times: list[tuple[float, float]] = field(default_factory=list)

    def row(self) -> Row:
        row: dict[str, Any] = {}
        if self.times:
            steps, hosts = zip(*self.times, strict=True)
            row |= {
                "ms": round(1e3 * statistics.median(steps), 3),
                "least ms": round(1e3 * min(steps), 3),
                "most ms": round(1e3 * max(steps), 3),
                "host ms": round(1e3 * statistics.median(hosts), 3),
                "rounds": len(self.times),
            }
        if self.peak_bytes:
            row |= {
                "peak GiB": round(self.peak_bytes / 2**30, 3),
                "peak bytes": self.peak_bytes,
            }
        row |= {"prepared s": round(self.seconds, 1), **self.predicted}
        if self.failed:
            row["failed"] = self.failed
        return row | {"remark": self.remark}


class Bench:
    """One model on the device, and how its step is measured."""

    def __init__(
        self, name: str, device: torch.device, *, steps: int, large: bool
    ) -> None:
        self.case = build(name, device, large=large)
        self.model = self.case.model
        self.device = device
        self.steps = steps
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


def knob(bench: Bench, budget: float) -> Active:
    """Compile each block by itself with torch's own budget."""
    compiled = Compiled(bench.model, budget)
    try:
        with compiled(bench.model):
            bench.step()
    finally:
        bench.release()
    return lambda: compiled(bench.model)


def fitted(bench: Bench, budget: int, executor: Any) -> tuple[str, Row, Active]:
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
    predicted = {
        "budget bytes": budget,
        "predicted bytes": report.predicted_peak_bytes,
        "predicted ms": round(1e3 * report.predicted_seconds, 3),
    }
    text, plan = "", report.plan
    if isinstance(report, CompiledFit):
        text += f"gradients {report.difference:.1e} (eager twice {report.noise:.1e})"
        text += ", other random numbers" if report.draws_otherwise else ""
        text += f", {len(report.eager)} blocks not compiled" if report.eager else ""
    else:
        text += f"{plan.regions} regions, {plan.repeated_calls} of them called again"

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

    return text, predicted, active


class Comparison:
    """All contenders of one model.

    Args:
        name: The model.
        device: Where it runs.
        options: Those of the command line.
        write: Takes the rows that are new, or more than they were.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        options: argparse.Namespace,
        write: Callable[[Iterable[Row]], None],
    ) -> None:
        self._name, self._options, self._write = name, options, write
        self._turns = Turns(options.lock, options.limit)
        self.bench = Bench(name, device, steps=options.steps, large=not options.small)
        self.contenders: list[Contender] = []

    def measure(self) -> None:
        """Prepare every contender, then time all of them in turns; write their rows."""
        options = self._options
        with self._turns.held(), compiling_beside(self._turns):
            self._prepare_all()
        if not self._turns.wait_for_others((options.limit + options.end) / 2):
            print(f"{self._name}: timed while others compile", flush=True)
        for _ in range(options.rounds):
            with self._turns.held():
                if not self._left(options.end):
                    break
                self._run_round()
            self._write(self._row(each) for each in self.contenders if each.times)

    def _row(self, contender: Contender) -> Row:
        names = {"model": self._name, "contender": contender.name}
        return {**names, **contender.row()}

    def _left(self, end: float) -> float:
        """Return the seconds that are left to prepare a contender."""
        return min(self._options.row_limit, max(end - seconds_since_start(), 0.0))

    def _prepare_all(self) -> None:
        options, bench = self._options, self.bench
        eager = self._prepare("eager", lambda: ("", {}, nullcontext))
        switch = partial(own_checkpointing, bench)
        own = self._prepare("own checkpointing", lambda: ("", {}, switch))
        if options.regions:
            regions = partial(per_block, bench)
            self._prepare("recoup, a region per block", lambda: ("", {}, regions))
        for executor in options.own:
            self._fit(f"fit ({executor}) at own checkpointing", own, executor)
        for share in options.knobs:
            found = self._prepare(f"torch knob {share}", partial(self._knob, share))
            for executor in options.executors:
                self._fit(f"fit ({executor}) at torch knob {share}", found, executor)
        for share in options.shares:
            asked = Contender("", peak_bytes=int(share * eager.peak_bytes))
            for executor in options.executors:
                self._fit(f"fit ({executor}) at {share:.0%}", asked, executor)

    def _knob(self, share: float) -> tuple[str, Row, Active]:
        with self._turns.given():
            return "", {}, knob(self.bench, share)

    def _fit(self, name: str, at: Contender, executor: str) -> None:
        if at.peak_bytes:
            self._prepare(name, lambda: fitted(self.bench, at.peak_bytes, executor))

    def _prepare(
        self, name: str, prepare: Callable[[], tuple[str, Row, Active]]
    ) -> Contender:
        contender = Contender(name)
        if not self._left(self._options.limit):
            print(f"{self._name}, {name}: no time left", flush=True)
            return contender
        self.contenders.append(contender)
        begun = time.perf_counter()
        try:
            with time_limit(self._left(self._options.limit)):
                contender.remark, contender.predicted, contender.active = prepare()
                with contender.active():
                    contender.peak_bytes = self.bench.peak_bytes()
        except Exception as error:  # noqa: BLE001 (a row of its own)
            contender.active = None
            contender.remark = f"{type(error).__name__}: {error!s:.200}"
            if OutOfTimeError.__name__ not in contender.remark:  # the compiler wraps it
                contender.failed = type(error).__name__
        contender.seconds = time.perf_counter() - begun
        self.bench.release()
        self._write([self._row(contender)])
        return contender

    def _run_round(self) -> None:
        for contender in self.contenders:
            if contender.active is not None:
                with contender.active():
                    contender.times.append(self.bench.times())
                self.bench.release()


def without_known(
    model: str, options: argparse.Namespace, folder: Path, device: torch.device
) -> None:
    """Leave out the cells of a model that the joined file has."""
    path = folder / f"{THEME}_{hardware(describe_machine(device))}.json"
    rows = rows_in(path)[1] if path.exists() else []
    known = {
        row["contender"]
        for row in rows
        if row["model"] == model and ("ms" in row or is_infeasible(row))
    }

    def are_known(at: str) -> bool:
        return all(f"fit ({e}) at {at}" in known for e in options.executors)

    options.own = [
        e for e in options.own if f"fit ({e}) at own checkpointing" not in known
    ]
    options.knobs = [k for k in options.knobs if not are_known(f"torch knob {k}")]
    options.shares = [s for s in options.shares if not are_known(f"{s:.0%}")]


def run_each(models: Sequence[str], given: Sequence[str]) -> int:
    """Run each model in a process of its own, all at once; return the first failure."""
    threads = max(1, (os.cpu_count() or 1) // len(models) - 1)
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads), **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.cases.ecosystem", *given]
        command += ["--lock", f"{folder}/turns", "--models"]
        workers = [subprocess.Popen([*command, m], env=environment) for m in models]
        try:
            return max(worker.wait() for worker in workers)
        finally:
            for worker in workers:
                worker.kill()


def head() -> str:
    """Return the commit of the working tree, with a plus if it was changed."""
    git = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    said = subprocess.run(git, capture_output=True, text=True, check=False)
    return said.stdout.strip() or "unknown"


def options_of(given: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line."""
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
    parser.add_argument(
        "--row-limit", type=float, default=240, help="seconds to prepare a contender"
    )
    parser.add_argument("--lock", type=Path, help="shared with other processes")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--missing", type=Path, help="leave out the results in here")
    parser.add_argument("--commit", help="of this tree, where git is not there")
    options = parsed(parser, given)
    models = options.models.split(",")
    if unknown := [name for name in models if name not in CASES]:
        parser.error(f"expected models of {', '.join(CASES)}, got {unknown}")
    options.models = models
    for name in ("own", "executors"):
        values = getattr(options, name).split(",")
        setattr(options, name, [value for value in values if value])
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    options = options_of(given)
    models = options.models
    if len(models) > 1:
        commit = options.commit or head()
        sys.exit(run_each(models, [*given, "--commit", commit]))
    device = device_at_hand()
    if device.type == "cpu":
        options.small, options.steps = True, 2
    if options.missing is not None:
        without_known(models[0], options, options.missing, device)
        if not (options.own or options.knobs or options.shares):
            return
    facts = {"commit": options.commit or head(), "steps in a row": options.steps}
    machine = describe_machine(device)
    journal = Journal(options.out / "rows.jsonl", machine, facts)

    def write(rows: Iterable[Row]) -> None:
        new = list(rows)
        journal.write(new)
        for row in new:
            cost = f"{row.get('ms', '-')} ms, {row.get('peak GiB', '-')} GiB"
            print(row["model"], row["contender"], cost, row["remark"], flush=True)

    Comparison(models[0], device, options, write).measure()


if __name__ == "__main__":
    main()

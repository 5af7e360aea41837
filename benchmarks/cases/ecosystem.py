"""Models nobody here wrote against the switch their users have, at equal measured peak.

For each model: the eager step, its own gradient checkpointing, its blocks compiled with
torch's `activation_memory_budget`, and recoup: a region per block, and `fit` at the
peak of the model's own checkpointing and at shares of the eager peak, with each
executor; `fit` by Inductor also at the measured peak of each of torch's budgets, right
after it. What runs without a compiler takes turns with the model's own checkpointing.
The eager step is measured once more at the end, to show the drift. No row takes longer
than a limit. Models have random weights; nothing is downloaded.

    python -m benchmarks.cases.ecosystem --models llama,t5 --limit 540
"""

import argparse
import gc
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import Any

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
from recoup.fitting.compiled_fit import CompiledFit

Contender = Callable[[], AbstractContextManager[str]]
"""Puts a contender on the model; the text says how that went."""


class OutOfTimeError(Exception):
    """A row took longer than its limit."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise `OutOfTimeError` in the block after some seconds; 0: never."""

    def stop(*_: object) -> None:
        raise OutOfTimeError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


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
        gc.collect()
        synchronize(self.device)
        if self.device.type == "cpu":
            with interval_meter(self.device) as meter:
                self.step()
            inputs = self.case.inputs
            held = [*self.model.parameters()]
            held += inputs.values() if isinstance(inputs, dict) else [inputs]
            return meter.peak_bytes + sum(tensor.nbytes for tensor in held)
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        self.step()
        synchronize(self.device)
        return torch.accelerator.max_memory_allocated()

    def times(self) -> tuple[float, float]:
        """Return the time of a step among several in a row, and the host's part."""
        self.step()
        gc.collect()
        since = mark(self.device)
        begun = time.perf_counter()
        for _ in range(self.steps):
            self.step()
        host = (time.perf_counter() - begun) / self.steps
        return since() / self.steps, host

    def measure(
        self, contenders: Mapping[str, Contender], *, rounds: int, limit: int
    ) -> dict[str, Row]:
        """Measure contenders in turns; each is put on anew in every round."""
        found: dict[str, dict[str, Any]] = {name: {} for name in contenders}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for turn in range(rounds):
            for name, contender in contenders.items():
                row = found[name]
                try:
                    with time_limit(limit), contender() as text:
                        peak = self.peak_bytes()
                        times[name] += [self.times() for _ in range(3)]
                    row["peak bytes"] = max(peak, row.get("peak bytes", 0))
                    row["remark"] = text
                except Exception as error:  # noqa: BLE001 (a row of its own)
                    row["remark"] = f"{type(error).__name__}: {error!s:.200}"
                self.model.zero_grad(set_to_none=True)
                gc.collect()
                if self.device.type != "cpu":
                    torch.accelerator.empty_cache()
                print(f"  turn {turn} of {name}: {row}", flush=True)
        return {
            name: _costs(times[name], found[name]) if times[name] else found[name]
            for name in contenders
        }


def _costs(times: Sequence[tuple[float, float]], row: Mapping[str, Any]) -> Row:
    steps, hosts = zip(*times, strict=True)
    return {
        "ms": round(1e3 * statistics.median(steps), 1),
        "least ms": round(1e3 * min(steps), 1),
        "peak GiB": round(row["peak bytes"] / 2**30, 3),
        "host ms": round(1e3 * statistics.median(hosts), 1),
        **row,
    }


@contextmanager
def eager() -> Iterator[str]:
    yield ""


@contextmanager
def own_checkpointing(bench: Bench) -> Iterator[str]:
    bench.case.switch(bench.model, on=True)
    try:
        yield ""
    finally:
        bench.case.switch(bench.model, on=False)


@contextmanager
def knob(bench: Bench, budget: float) -> Iterator[str]:
    """Compile each block by itself with torch's own budget."""
    torch.compiler.reset()
    with Compiled(bench.model, budget)(bench.model):
        yield ""
    torch.compiler.reset()


@contextmanager
def per_block(bench: Bench) -> Iterator[str]:
    for name in bench.blocks:
        recoup.checkpoint_module(bench.model.get_submodule(name))
    try:
        yield ""
    finally:
        for name in bench.blocks:
            recoup.uncheckpoint_module(bench.model.get_submodule(name))


@contextmanager
def fitted(bench: Bench, budget: int, executor: Any) -> Iterator[str]:
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
    text = (
        f"fit {report.total_seconds:.1f} s, predicted "
        f"{report.predicted_peak_bytes / 2**30:.2f} GiB "
        f"{1e3 * report.predicted_seconds:.0f} ms"
    )
    if isinstance(report, CompiledFit):
        text += f", gradients {report.difference:.1e} (eager twice {report.noise:.1e})"
        text += ", other random numbers" if report.draws_otherwise else ""
        text += f", {len(report.eager)} blocks not compiled" if report.eager else ""
    else:
        plan = report.plan
        text += f", {plan.regions} regions, {plan.repeated_calls} of them called again"
    try:
        yield text
    finally:
        report.remove()


class Comparison:
    """All contenders of one model; those in the table already are not measured."""

    def __init__(
        self, name: str, device: torch.device, table: Table, options: argparse.Namespace
    ) -> None:
        self._name, self._table, self._options = name, table, options
        self._device = device

    @cached_property
    def bench(self) -> Bench:
        return Bench(self._name, self._device, steps=self._options.steps)

    def measure(self) -> None:
        """Measure every contender."""
        options = self._options
        (first,) = self._rows({"eager": eager})
        (own,) = self._rows({"own checkpointing": self._switch})
        peak: Any = first.get("peak bytes", 0)
        for share in options.shares:
            self._fit_at(f"{share:.0%}", share * peak)
        if "peak bytes" in own:
            self._fit_at("own checkpointing", own["peak bytes"])
        if options.regions:
            self._rows({"recoup, a region per block": lambda: per_block(self.bench)})
        for share in options.knobs:
            self._compare_with_knob(share)
        self._rows({"eager, again": eager})

    def _fit_at(self, label: str, budget: Any) -> None:
        """Measure `fit` with each executor at a peak."""
        for executor in self._options.executors:
            together = {f"fit ({executor}) at {label}": self._fitted(budget, executor)}
            rounds = 1
            if (executor, label) == ("eager", "own checkpointing"):
                together["own checkpointing, in turns"] = self._switch
                rounds = self._options.rounds
            self._rows(together, rounds)

    def _compare_with_knob(self, share: float) -> None:
        label = f"torch knob {share}"
        (found,) = self._rows({label: lambda: knob(self.bench, share)})
        if "inductor" in self._options.executors and "peak bytes" in found:
            ours = self._fitted(found["peak bytes"], "inductor")
            self._rows({f"fit (inductor) at {label}": ours})

    def _rows(self, contenders: dict[str, Contender], rounds: int = 1) -> list[Row]:
        """Return the rows of contenders that are measured together."""
        measured: dict[str, Row] = {}

        def row(contender: str) -> Row:
            if not measured:
                limit = self._options.row_limit
                found = self.bench.measure(contenders, rounds=rounds, limit=limit)
                measured.update(found)
            return measured[contender]

        return [
            self._table.row(self._name, name, partial(row, name)) for name in contenders
        ]

    def _switch(self) -> AbstractContextManager[str]:
        return own_checkpointing(self.bench)

    def _fitted(self, budget: Any, executor: str) -> Contender:
        return lambda: fitted(self.bench, int(budget), executor)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--executors", default="eager,exact,inductor")
    parser.add_argument("--shares", type=numbers, default="0.9,0.75,0.6,0.5,0.4")
    parser.add_argument("--knobs", type=numbers, default="1,0.7,0.5,0.3,0.1,0")
    parser.add_argument("--regions", action="store_true", help="a region per block too")
    parser.add_argument(
        "--rounds", type=int, default=2, help="turns without a compiler"
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--limit", type=float, default=float("inf"))
    parser.add_argument("--row-limit", type=int, default=240, help="seconds for a row")
    options = parsed(parser, arguments)
    options.executors = [name for name in options.executors.split(",") if name]
    device = device_at_hand()
    settings = {"steps in a row": options.steps, "dtype": "bfloat16 on a GPU"}
    table = Table("ecosystem", device, settings, options.out, options.limit)
    try:
        for name in options.models.split(","):
            Comparison(name, device, table, options).measure()
    except TimeoutError as error:
        print(f"Not finished: {error}. The same command goes on from here.")


if __name__ == "__main__":
    main()

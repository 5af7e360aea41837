"""At equal peak memory, is a fitted step faster than PyTorch's own ways?

Each peer's step is measured; `fit` is given the peer's measured peak as its budget;
then all of them run in turns, with the plain step and further budgets for the curve.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import recoup
from benchmarks.harness import (
    Cell,
    Row,
    Spread,
    describe_machine,
    in_turns,
    markdown_table,
    write_results,
)
from benchmarks.plots import draw_frontiers
from benchmarks.zoo.case import Scale
from benchmarks.zoo.cases import CASES
from benchmarks.zoo.peers import PEERS, Compiled, Context, plain
from benchmarks.zoo.problem import Problem, free_device
from recoup import InfeasibleError
from recoup.engine.plans import Applied

MODELS = ("gpt", "gpt wide", "vit", "resnet-152", "u-net")
CURVE = (0.8, 0.6, 0.45)
"""Further budgets, as shares of the plain peak; the floor is the last point."""

COMPILED_BUDGETS = (1.0, 0.7, 0.5, 0.3, 0.1)


@dataclass(frozen=True)
class Contender:
    """A way to run a step.

    Attributes:
        enter: Puts it around the model.
        peak_bytes: Its measured peak.
        report: What `fit` said of it, if it is ours.
        beside: The peer whose peak was its budget.
    """

    enter: Context
    peak_bytes: int
    report: recoup.Fit | None = None
    beside: str | None = None


def fitted(problem: Problem, budget_bytes: int, beside: str | None) -> Contender:
    """Fit the model to a budget, and take the plan off again."""
    _, report = recoup.fit(
        problem.model, problem.batch, budget_bytes, loss=problem.case.loss
    )
    report.remove()

    @contextmanager
    def enter(model: nn.Module) -> Any:
        # Verified by `fit`; a plan that is put on again would be verified again.
        applied = Applied(model, report.plan, verify="off")
        try:
            yield
        finally:
            applied.remove()

    return Contender(enter, peak_of(problem, enter), report, beside)


def peak_of(problem: Problem, enter: Context) -> int:
    with enter(problem.model):
        problem.seconds()
        return problem.peak_bytes()


def seconds_of(problem: Problem, enter: Context) -> float:
    around: AbstractContextManager[Any] = enter(problem.model)
    with around:
        return problem.seconds()


def contenders_of(
    problem: Problem, *, compiled: bool, curve: Sequence[float]
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return everyone who takes part, and why others do not."""
    found = {"plain": Contender(plain, peak_of(problem, plain))}
    absent: dict[str, str] = {}
    peers: dict[str, Context] = dict(PEERS)
    for name, enter in peers.items():
        found[name] = Contender(enter, peak_of(problem, enter))
    if compiled:
        for budget in COMPILED_BUDGETS:
            torch.compiler.reset()
            enter = Compiled(problem.model, budget)
            name = f"torch.compile, budget {budget:.1f}"
            found[name] = Contender(enter, peak_of(problem, enter))
    plain_bytes = found["plain"].peak_bytes
    floor_bytes = 0
    budgets = {
        f"recoup beside {name}": (found[name].peak_bytes, name) for name in peers
    }
    budgets |= {
        f"recoup {share:.0%}": (int(share * plain_bytes), None) for share in curve
    }
    for name, (budget_bytes, beside) in budgets.items():
        try:
            found[name] = fitted(problem, budget_bytes, beside)
        except InfeasibleError as error:
            absent[name] = (
                f"infeasible: the floor is {error.floor_bytes / 2**30:.3f} GiB"
            )
            floor_bytes = error.floor_bytes
            continue
        report = found[name].report
        assert report is not None, "ours"
        floor_bytes = report.floor_bytes
    try:
        found["recoup floor"] = fitted(problem, floor_bytes, None)
    except InfeasibleError as error:
        absent["recoup floor"] = f"infeasible: {error!s:.60}"
    return found, absent


def rows_of(
    problem: Problem, *, compiled: bool, curve: Sequence[float], rounds: int
) -> list[Row]:
    contenders, absent = contenders_of(problem, compiled=compiled, curve=curve)
    steps: Mapping[str, Callable[[], float]] = {
        name: partial(seconds_of, problem, contender.enter)
        for name, contender in contenders.items()
    }
    times = {
        name: Spread.of(seconds)
        for name, seconds in in_turns(steps, warmup=2, rounds=rounds).items()
    }
    rows = [row_of(problem, name, contenders, times) for name in contenders]
    rows += [
        {"model": problem.case.name, "contender": name, "beside it": why}
        for name, why in absent.items()
    ]
    return rows


def row_of(
    problem: Problem,
    name: str,
    contenders: Mapping[str, Contender],
    times: Mapping[str, Spread],
) -> Row:
    contender, spread = contenders[name], times[name]
    row: dict[str, Cell] = {
        "model": problem.case.name,
        "contender": name,
        "peak MiB": round(contender.peak_bytes / 2**20, 2),
        "step ms": round(1e3 * spread.median, 2),
        "least to largest": f"{1e3 * spread.least:.2f} to {1e3 * spread.largest:.2f}",
        "overhead": f"{spread.median / times['plain'].median - 1:+.1%}",
    }
    report = contender.report
    if report is None:
        return row
    row |= {
        "predicted MiB": round(report.predicted_peak_bytes / 2**20, 2),
        "predicted ms": round(1e3 * report.predicted_seconds, 2),
        "gap": f"{report.gap:.2%}",
        "fit s": round(report.total_seconds, 1),
    }
    if contender.beside is not None:
        peer = times[contender.beside]
        fits = contender.peak_bytes <= contenders[contender.beside].peak_bytes
        row["beside it"] = (
            f"{spread.median / peer.median - 1:+.1%} time at "
            f"{'no more' if fits else 'MORE'} memory"
        )
    return row


def measure(
    names: Sequence[str],
    scale: Scale,
    device: torch.device,
    *,
    compiled: bool,
    rounds: int,
    curve: Sequence[float],
) -> Iterator[tuple[list[Row], dict[str, Cell]]]:
    """Run the models one after the other; yield all that is known after each."""
    settings: dict[str, Cell] = {"scale": scale, "rounds": rounds}
    rows: list[Row] = []
    for name in names:
        start = time.perf_counter()
        problem = Problem(CASES[name], scale, device)
        found = rows_of(problem, compiled=compiled, curve=curve, rounds=rounds)
        del problem
        free_device(device)
        rows += found
        print(markdown_table(found))
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        yield rows, settings


def draw(record: Path) -> None:
    """Draw the rows of a results file beside it, where matplotlib is installed."""
    rows = json.loads(record.read_text())["rows"]
    drawn = draw_frontiers(rows, record.with_suffix(".svg"))
    print(f"Drawn in {drawn}." if drawn else "Not drawn: matplotlib is not installed.")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", choices=("tiny", "large"))
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=CASES)
    parser.add_argument("--compiled", action="store_true", help="torch.compile too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--curve", nargs="*", type=float, default=CURVE)
    parser.add_argument("--draw", type=Path, help="only draw a results file (.json)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(arguments)
    if options.draw is not None:
        draw(options.draw)
        return
    device = torch.accelerator.current_accelerator(check_available=True)
    device = device or torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    known = measure(
        options.models,
        options.scale or ("tiny" if device.type == "cpu" else "large"),
        device,
        compiled=options.compiled,
        rounds=options.rounds,
        curve=options.curve,
    )
    page = options.out
    for rows, settings in known:
        page = write_results(
            "frontier",
            rows,
            machine=describe_machine(device),
            settings=settings,
            folder=options.out,
        )
    print(f"Written to {page} and the .json beside it.")
    draw(page.with_suffix(".json"))


if __name__ == "__main__":
    main()

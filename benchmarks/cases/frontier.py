"""At equal peak memory, is a fitted step faster than PyTorch's own ways?

Each peer's step is measured; `fit` is given the peer's measured peak as its budget;
then all of them run in turns, with the plain step, and with budgets at which others
have published what they reach.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import recoup
from benchmarks.harness import (
    Cell,
    Pace,
    Row,
    Spread,
    describe_machine,
    describe_pace,
    device_at_hand,
    in_turns,
    markdown_table,
    parsed,
    scale_for,
    write_results,
)
from benchmarks.plots import draw_frontiers
from benchmarks.zoo.case import Scale
from benchmarks.zoo.cases import CASES
from benchmarks.zoo.peers import PEERS, Compiled, Context
from benchmarks.zoo.problem import Problem, free_device
from recoup.engine.applied.applied_plan import Applied
from recoup.errors import InfeasibleError

MODELS = ("gpt", "gpt wide", "vit", "resnet-152", "u-net")

LITERATURE = {
    "gpt": {0.5: "+6%, transformer", 0.4: "+9%, transformer, DTR, compute only"},
    "gpt wide": {0.5: "+6%, transformer", 0.4: "+9%, transformer, DTR, compute only"},
    "vit": {0.5: "+6%, transformer", 0.4: "+9%, transformer, DTR, compute only"},
    "resnet-152": {0.5: "+10%, ResNet", 0.33: "+12%, ResNet-50, MONeT"},
    "u-net": {0.5: "", 0.35: "+11.5%, U-Net, MONeT"},
}
"""What others have published: the overhead at a share of the activations' bytes."""

COMPILED_BUDGETS = (0.5, 0.2)

KINDS = ("eager", "compiled")
"""The kinds of peers: those around a model's blocks, and torch.compile."""

STEPS_IN_A_ROW = 6


@dataclass(frozen=True)
class Times:
    """The times of a contender's steps."""

    alone: Spread
    in_a_row: Spread

    @staticmethod
    def of(paces: Sequence[Pace]) -> "Times":
        return Times(
            Spread.of([pace.alone for pace in paces]),
            Spread.of([pace.in_a_row for pace in paces]),
        )


@dataclass(frozen=True)
class Contender:
    """A way to run a step.

    Attributes:
        enter: Puts it around the model.
        peak_bytes: Its measured peak.
        report: What `fit` said of it, if it is ours.
        beside: The peer whose peak was its budget.
        published: What others have published at this share of the activations.
    """

    enter: Context
    peak_bytes: int
    report: recoup.results.Fit | None = None
    beside: str | None = None
    published: str = ""


@dataclass(frozen=True)
class Target:
    """A budget for `fit`, and what its outcome is compared with."""

    budget_bytes: int
    beside: str | None = None
    published: str = ""


def fitted(problem: Problem, target: Target) -> Contender:
    """Fit the model to a budget, and take the plan off again.

    Without gradients, as before training: `fit` keeps those there are on the host.
    """
    problem.clear()
    _, report = recoup.fit(
        problem.model, problem.batch, target.budget_bytes, loss=problem.case.loss
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

    peak_bytes = peak_of(problem, enter)
    return Contender(enter, peak_bytes, report, target.beside, target.published)


def peak_of(problem: Problem, enter: Context) -> int:
    with enter(problem.model):
        problem.seconds()
        return problem.peak_bytes()


def pace_with(problem: Problem, enter: Context) -> Pace:
    around: AbstractContextManager[Any] = enter(problem.model)
    with around:
        return problem.pace(steps=STEPS_IN_A_ROW)


def resident_bytes(problem: Problem) -> int:
    """Return the bytes of parameters, buffers and the batch."""
    tensors = [*problem.model.parameters(), *problem.model.buffers()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    held = sum(storage.nbytes() for storage in storages.values())
    return held + sum(tensor.nbytes for tensor in problem.given())


def targets_of(
    problem: Problem, contenders: Mapping[str, Contender]
) -> dict[str, Target]:
    """Return the budgets for `fit`: those of the peers, and those of publications."""
    found = {
        f"recoup beside {name}": Target(contender.peak_bytes, beside=name)
        for name, contender in contenders.items()
        if name != "plain"
    }
    resident = resident_bytes(problem)
    activations = contenders["plain"].peak_bytes - resident
    for share, published in LITERATURE.get(problem.case.name, {}).items():
        found[f"recoup, {share:.0%} of activations"] = Target(
            resident + int(share * activations), published=published
        )
    return found


def peers_of(problem: Problem, kinds: Sequence[str]) -> dict[str, Context]:
    """Return the ways of others that take part."""
    found: dict[str, Context] = dict(PEERS) if "eager" in kinds else {}
    if "compiled" in kinds:
        torch.compiler.reset()
        found |= {
            f"torch.compile, budget {budget:.1f}": Compiled(problem.model, budget)
            for budget in COMPILED_BUDGETS
        }
    return found


def contenders_of(
    problem: Problem, kinds: Sequence[str]
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return everyone who takes part, and why others do not."""
    found = {"plain": Contender(nullcontext, peak_of(problem, nullcontext))}
    absent: dict[str, str] = {}
    for name, enter in peers_of(problem, kinds).items():
        try:
            found[name] = Contender(enter, peak_of(problem, enter))
        except Exception as error:
            if not isinstance(enter, Compiled):
                raise
            # Whatever the compiler says: the others can be compared without it.
            absent[name] = f"{type(error).__name__}: {error!s:.60}"
    floor_bytes = 0
    for name, target in targets_of(problem, found).items():
        try:
            found[name] = fitted(problem, target)
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
        found["recoup floor"] = fitted(problem, Target(floor_bytes))
    except InfeasibleError as error:
        absent["recoup floor"] = f"infeasible: {error!s:.60}"
    return found, absent


def rows_of(problem: Problem, kinds: Sequence[str], *, rounds: int) -> list[Row]:
    contenders, absent = contenders_of(problem, kinds)
    steps: Mapping[str, Callable[[], Pace]] = {
        name: partial(pace_with, problem, contender.enter)
        for name, contender in contenders.items()
    }
    times = {
        name: Times.of(paces)
        for name, paces in in_turns(steps, warmup=0, rounds=rounds).items()
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
    times: Mapping[str, "Times"],
) -> Row:
    contender, spread = contenders[name], times[name].in_a_row
    plain_seconds = times["plain"].in_a_row.median
    row: dict[str, Cell] = {
        "model": problem.case.name,
        "contender": name,
        "peak MiB": round(contender.peak_bytes / 2**20, 2),
        "step ms": round(1e3 * spread.median, 2),
        "least to largest": f"{1e3 * spread.least:.2f} to {1e3 * spread.largest:.2f}",
        "overhead": f"{spread.median / plain_seconds - 1:+.1%}",
        "alone ms": round(1e3 * times[name].alone.median, 2),
        "activations left": f"{activations_left(problem, contender, contenders):.0%}",
        "published": contender.published,
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
        peer = times[contender.beside].in_a_row
        alone = times[name].alone.median / times[contender.beside].alone.median
        fits = contender.peak_bytes <= contenders[contender.beside].peak_bytes
        row["time by its time"] = round(spread.median / peer.median, 3)
        row["beside it"] = (
            f"{spread.median / peer.median - 1:+.1%} time at "
            f"{'no more' if fits else 'MORE'} memory ({alone - 1:+.1%} alone)"
        )
    return row


def activations_left(
    problem: Problem, contender: Contender, contenders: Mapping[str, Contender]
) -> float:
    """Return the peak as a share of the plain one, both without what is resident."""
    resident = resident_bytes(problem)
    plain_bytes = contenders["plain"].peak_bytes - resident
    return (contender.peak_bytes - resident) / plain_bytes


def measure(
    names: Sequence[str],
    scale: Scale,
    device: torch.device,
    *,
    kinds: Sequence[str],
    rounds: int,
) -> Iterator[tuple[list[Row], dict[str, Cell]]]:
    """Run the models one after the other; yield all that is known after each."""
    settings: dict[str, Cell] = {
        "scale": scale,
        "rounds": rounds,
        "step ms": describe_pace(STEPS_IN_A_ROW),
        "activations left": "peak without parameters, buffers and the batch, as a "
        "share of the plain one; gradients count",
        "published": "what others have published at that share, see LITERATURE",
    }
    rows: list[Row] = []
    for name in names:
        start = time.perf_counter()
        problem = Problem(CASES[name], scale, device)
        found = rows_of(problem, kinds, rounds=rounds)
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


def models_in(text: str) -> list[str]:
    """Return the models that a list with commas names."""
    names = text.split(",")
    for name in names:
        if name not in CASES:
            known = ", ".join(CASES)
            raise argparse.ArgumentTypeError(f"no model {name!r}; there are {known}")
    return names


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", choices=("tiny", "large"))
    parser.add_argument("--models", type=models_in, default=list(MODELS))
    parser.add_argument("--peers", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--draw", type=Path, help="only draw a results file (.json)")
    options = parsed(parser, arguments)
    if options.draw is not None:
        draw(options.draw)
        return
    device = device_at_hand()
    known = measure(
        options.models,
        scale_for(device, options.scale),
        device,
        kinds=options.peers,
        rounds=options.rounds,
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

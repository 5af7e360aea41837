"""Does what `fit` returns fit, and is it as fast as it says?"""

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import recoup
from benchmarks.harness import (
    Cell,
    Row,
    describe_machine,
    describe_pace,
    device_at_hand,
    markdown_table,
    parsed,
    scale_for,
    write_results,
)
from benchmarks.zoo.case import Case, Scale
from benchmarks.zoo.cases import CASES
from benchmarks.zoo.problem import STEPS_IN_A_ROW, Cost, Problem, free_device
from recoup.errors import InfeasibleError, RecoupError

SHARES = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3)
"""Budgets, as shares of the measured peak of the plain step; the floor comes after."""

ROWS = 3
"""How many rows of steps are timed: a median of two would count every hiccup."""

PEAK_TOLERANCE = 0.03
SECONDS_TOLERANCE = 0.10
"""How far predictions may be from what is measured, as shares of it."""


def rows_of(
    case: Case,
    scale: Scale,
    device: torch.device,
    shares: Sequence[float],
    *,
    batches: int = 1,
) -> Iterator[Row]:
    """Fit one model to each budget and to the floor."""
    problem = Problem(case, scale, device, batches=batches)
    name = case.name if batches == 1 else f"{case.name}, batch x{batches}"
    plain = problem.cost(warmup=2, rounds=ROWS)
    floor_bytes = 0
    for share in (*shares, None):
        if share is None:
            label, budget_bytes = "floor", floor_bytes
        else:
            label, budget_bytes = f"{share:.0%}", int(share * plain.peak_bytes)
        row: dict[str, Cell] = {"model": name, "share": label}
        row |= sizes("budget", budget_bytes, scale)
        try:
            found, floor_bytes = fitted(problem, budget_bytes, plain, scale)
        except InfeasibleError as error:
            floor_bytes = error.floor_bytes
            found = {"fits": "infeasible", **sizes("floor", floor_bytes, scale)}
        except (RecoupError, torch.OutOfMemoryError) as error:
            found = {"fits": f"ERROR {type(error).__name__}: {error!s:.80}"}
        yield row | found


def fitted(
    problem: Problem, budget_bytes: int, plain: Cost, scale: Scale
) -> tuple[dict[str, Cell], int]:
    """Fit a model to a budget; return the rest of its row, and its floor."""
    start = time.perf_counter()
    _, report = recoup.fit(
        problem.model, problem.batch, budget_bytes, loss=problem.case.loss
    )
    fit_seconds = time.perf_counter() - start
    try:
        cost = problem.cost(rounds=ROWS)
    finally:
        report.remove()
    peak_error = report.predicted_peak_bytes / cost.peak_bytes - 1
    seconds_error = report.predicted_seconds / cost.seconds - 1
    planned_error = report.planned_seconds / cost.seconds - 1
    least, largest = cost.range_seconds
    overhead = report.predicted_seconds / report.plain_seconds - 1
    row: dict[str, Cell] = {
        "fits": "yes" if cost.peak_bytes <= budget_bytes else "NO",
        **sizes("plain", plain.peak_bytes, scale),
        **sizes("floor", report.floor_bytes, scale),
        **sizes("predicted", report.predicted_peak_bytes, scale),
        **sizes("measured", cost.peak_bytes, scale),
        "peak error": f"{peak_error:+.2%}",
        "plain ms": round(1e3 * plain.seconds, 2),
        "predicted ms": round(1e3 * report.predicted_seconds, 2),
        "measured ms": round(1e3 * cost.seconds, 2),
        "least to largest": f"{1e3 * least:.1f} to {1e3 * largest:.1f}",
        "alone ms": round(1e3 * cost.alone_seconds, 2),
        "time error": f"{seconds_error:+.1%}",
        "error as planned": f"{planned_error:+.1%}",
        "overhead": f"{cost.seconds / plain.seconds - 1:+.1%}",
        "overhead predicted": f"{overhead:+.1%}",
        "gap": f"{report.gap:.2%}",
        "planner": report.planner,
        "regions": len(report.plan.spans),
        "rounds": report.rounds,
        "planning s": round(report.planning_seconds, 2),
        "fit s": round(fit_seconds, 2),
        "fit in steps": round(fit_seconds / plain.seconds, 1),
        "fit less 5 s, in steps": round(max(0, fit_seconds - 5) / plain.seconds, 1),
    }
    return row, report.floor_bytes


def sizes(name: str, nbytes: int, scale: Scale) -> dict[str, Cell]:
    """Return a column of bytes, in the unit that suits the scale."""
    unit, shift = ("GiB", 30) if scale == "large" else ("KiB", 10)
    return {f"{name} {unit}": round(nbytes / (1 << shift), 3)}


def summary(rows: Sequence[Row]) -> dict[str, Cell]:
    """Return how many cells hold what is promised of them."""
    cells = [row for row in rows if row["fits"] != "infeasible"]
    done = [row for row in cells if "measured ms" in row]
    return {
        "cells that are feasible": len(cells),
        "of them within the budget": sum(row["fits"] == "yes" for row in cells),
        "peak predicted within 3 %": sum(
            _share(row["peak error"]) <= PEAK_TOLERANCE for row in done
        ),
        "time predicted within 10 %": sum(
            _share(row["time error"]) <= SECONDS_TOLERANCE for row in done
        ),
        "time planned within 10 %, before it ran": sum(
            _share(row["error as planned"]) <= SECONDS_TOLERANCE for row in done
        ),
        "fit under 15 steps plus 5 s": sum(
            float(row["fit less 5 s, in steps"] or 0) <= 15 for row in done
        ),
    }


def _share(text: Cell) -> float:
    return abs(float(str(text).rstrip("%"))) / 100


def measure(
    names: Sequence[str],
    scale: Scale,
    device: torch.device,
    *,
    shares: Sequence[float],
    batches: int,
    folder: Path,
) -> None:
    """Fit the models one after the other; write down what is known after each."""
    rows: list[Row] = []
    page = folder
    for name in names:
        start = time.perf_counter()
        case = CASES[name]
        found = list(rows_of(case, scale, device, shares, batches=batches))
        free_device(device)
        rows += found
        print(markdown_table(found))
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        page = write_results(
            "fitting",
            rows,
            machine=describe_machine(device),
            settings={
                "scale": scale,
                "ms": describe_pace(STEPS_IN_A_ROW),
                **summary(rows),
            },
            folder=folder,
        )
    print(summary(rows))
    print(f"Written to {page} and the .json beside it.")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", choices=("tiny", "large"))
    parser.add_argument("--models", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--batches", type=int, default=1, help="make one of so many")
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES)
    options = parsed(parser, arguments)
    device = device_at_hand()
    scale = scale_for(device, options.scale)
    measure(
        options.models,
        scale,
        device,
        shares=options.shares,
        batches=options.batches,
        folder=options.out,
    )


if __name__ == "__main__":
    main()

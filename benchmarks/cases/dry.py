"""How near is a dry measurement to the step that it did not run?"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import recoup
from benchmarks.harness import (
    Row,
    device_at_hand,
    markdown_table,
    parsed,
    publish,
    scale_for,
)
from benchmarks.zoo.case import Case, Scale, cast
from benchmarks.zoo.cases import CASES
from benchmarks.zoo.problem import Problem, free_device
from recoup.core.device_figures import FIGURES
from recoup.core.graph import Graph
from recoup.core.simulation import simulate

NAMES = ("gpt", "gpt wide", "llama", "bert", "vit", "resnet-152", "convnext", "u-net")


def row_of(case: Case, scale: Scale, device: torch.device, figures: str) -> Row:
    """Measure a model's step for real and dry, there and on the meta device."""
    problem = Problem(case, scale, device)
    cost = problem.cost()
    there, there_seconds = _dry(case, problem.model, problem.batch, figures)
    dtype = next(problem.model.parameters()).dtype
    del problem
    free_device(device)
    with torch.device("meta"):
        model = case.make(scale).to(dtype=dtype)
        inputs, target = case.feed(scale)
    anywhere, anywhere_seconds = _dry(
        case, model, (cast(inputs, dtype), target), figures
    )
    return {
        "model": case.name,
        "peak MiB": round(cost.peak_bytes / 2**20, 1),
        "dry": _off(simulate(there, ()).peak_bytes, cost.peak_bytes),
        "dry, from meta": _off(simulate(anywhere, ()).peak_bytes, cost.peak_bytes),
        "step ms": round(cost.seconds * 1000, 2),
        "estimate ms": round(there.step_seconds * 1000, 2),
        "estimate, from meta ms": round(anywhere.step_seconds * 1000, 2),
        "dry took s": round(there_seconds, 1),
        "from meta took s": round(anywhere_seconds, 1),
    }


def _dry(case: Case, model: nn.Module, batch: Any, figures: str) -> tuple[Graph, float]:
    start = time.perf_counter()
    graph = recoup.measure(model, batch, loss=case.loss, dry=True, device=figures)
    return graph, time.perf_counter() - start


def _off(found_bytes: int, expected_bytes: int) -> str:
    return f"{found_bytes / expected_bytes - 1:+.2%}"


def figures_for(device: torch.device) -> str:
    """Return whose figures estimate the times of a device."""
    if device.type == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name(device).lower().replace(" ", "")
    return next((known for known in FIGURES if known in name), "h200")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", choices=("tiny", "large"))
    parser.add_argument("--models", nargs="*", default=NAMES, choices=CASES)
    options = parsed(parser, arguments)
    device = device_at_hand()
    scale = scale_for(device, options.scale)
    rows: list[Row] = []
    for name in options.models:
        rows.append(row_of(CASES[name], scale, device, figures_for(device)))
        print(markdown_table(rows[-1:]), flush=True)
        free_device(device)
        publish(
            "dry",
            rows,
            device=device,
            settings={"scale": scale, "figures": figures_for(device)},
            folder=options.out,
        )


if __name__ == "__main__":
    main()
